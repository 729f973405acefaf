"""The recipe of `checkpoints/tiny`: a target, a draft and a micro with one tokenizer, then feature drafts.

    target   deep and narrow; learns to work out the answers of `data_gen.stories`, by cross-entropy.
    draft    one layer; learns the phrases, distilled from the target: KL(p || q) at each answer position. With a second
             layer it would look up words in the prompt, and be accepted so often that little is left to predict.
    micro    one layer, much narrower, for hierarchies of three models.

Distillation makes both models equally unsure about free choices of wording, so a token drawn from q is accepted
although its entropy is high. Where something has to be worked out, p is nearly one-hot and q is spread. On a CPU depth,
not width, decides t_target / t_draft. Same seed, recipe, machine and thread count give the same bytes.
"""

import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.recipes import feature_drafts, texts
from checkpoints.recipes.feature_drafts import DraftRecipe, DSparkRecipe, feature_loss
from checkpoints.recipes.fit import Pupil, fit
from checkpoints.recipes.texts import StoryBatch, TargetReading
from configs.paths import local_path
from configs.schema import ModelSource
from lm.features.dspark import DSpark
from lm.features.eagle import Eagle
from lm.features.glide import Glide
from lm.pair import load_model, load_tokenizer
from store.shards import atomic_directory

TRIO = ("target", "draft", "micro")
# files of a model's directory; a directory with anything else is never overwritten
_FILES = {
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "figures.json",
}

Shape = tuple[int, int, int, int]
"""Layers, hidden size, intermediate size and attention heads of a model."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything but seed and machine that decides the models' bytes."""

    target: Shape = (10, 128, 352, 4)
    draft: Shape = (1, 96, 256, 3)
    micro: Shape = (1, 24, 64, 1)
    vocab_size: int = 768
    num_tokenizer_stories: int = 4000
    batch_size: int = 16
    target_steps: int = 2000
    distil_steps: int = 1200
    learning_rate: float = 4e-3
    eagle_and_glide: DraftRecipe = field(default_factory=DraftRecipe)
    dspark_draft: DSparkRecipe = field(default_factory=DSparkRecipe)


RECIPE = Recipe()


def tiny(
    *,
    dir: str = "checkpoints/tiny",
    seed: int = 0,
    models: Literal["all", "trio", "feature_drafts", "dspark"] = "all",
    overwrite: bool = False,
) -> None:
    """Train the embedded models: about 30 minutes on one core.

    Args:
        dir: the folder that gets target, draft and micro, eagle, glide and dspark; feature drafts resume from
            checkpoints beside them (eagle-glide-work, dspark-work).
        seed: decides the weights and the stories.
        models: trio is target, draft and micro; feature_drafts are an EAGLE, a GliDe and a DSpark draft for the target
            that is there; dspark is the last alone.
        overwrite: replace models that are there already.
    """
    if models in ("all", "trio"):
        make_trio(dir, seed=seed, overwrite=overwrite)
    if models in ("all", "feature_drafts"):
        make_drafts(dir, ["eagle", "glide"], seed=seed, overwrite=overwrite)
    if models != "trio":
        make_drafts(dir, ["dspark"], seed=seed, overwrite=overwrite)


def make_trio(out_dir: str | Path, *, seed: int = 0, recipe: Recipe = RECIPE, overwrite: bool = False) -> None:
    """Train the trio, and write it once all three are trained; prints acceptance rates on the test split."""
    directory = local_path(out_dir, "--dir")
    _refuse_present(directory, TRIO, overwrite=overwrite)
    torch.set_num_threads(1)  # more would gain little, since the models are small
    torch.manual_seed(seed)
    train_stories = texts.new_stories(seed, recipe.batch_size * max(recipe.target_steps, recipe.distil_steps))
    tokenizer = texts.train_tokenizer(train_stories[: recipe.num_tokenizer_stories], recipe.vocab_size)
    batches = texts.story_batches(train_stories, tokenizer, batch_size=recipe.batch_size, seed=seed)
    models = {name: _new_model(getattr(recipe, name), tokenizer) for name in TRIO}
    target, *drafts = models.values()
    train = partial(fit, learning_rate=recipe.learning_rate)
    train([Pupil(target, partial(text_loss, target))], batches, title="train target", num_steps=recipe.target_steps)
    target.bfloat16().float()  # rounded as it will be stored, so that the others learn from the target that is shipped
    pupils = [Pupil(draft, partial(imitation_loss, draft)) for draft in drafts]
    readings = map(partial(TargetReading.of, target), batches)
    train(pupils, readings, title="distil draft and micro", num_steps=recipe.distil_steps)
    for name, model in models.items():
        with atomic_directory(directory / name) as folder:
            model.bfloat16().save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    held_out = texts.held_out(tokenizer, recipe.batch_size, seed)
    for name in TRIO[1:]:
        rates = texts.acceptance_rates(partial(log_q, models[name].float()), target.float(), held_out)
        print(f"{name}: acceptance rate {rates.mean():.3f}, standard deviation over positions {rates.std():.3f}")


def make_drafts(
    out_dir: str | Path, kinds: Sequence[str], *, seed: int = 0, recipe: Recipe = RECIPE, overwrite: bool = False
) -> None:
    """Train drafts for `out_dir`/target on the same batches, and write them with figures on the test split; resumes."""
    directory = local_path(out_dir, "--dir")
    is_dspark = "dspark" in kinds
    _refuse_present(directory, kinds, overwrite=overwrite)
    source = ModelSource(path=str(directory / "target"), dtype="float32", device_map="cpu")
    target = load_model(source).requires_grad_(False)
    tokenizer = load_tokenizer(source)
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    settings: DraftRecipe = recipe.dspark_draft if is_dspark else recipe.eagle_and_glide
    size = settings.batch_size
    work = directory / f"{'-'.join(kinds)}-work"
    stories = texts.new_stories(seed, size * settings.num_steps)
    story_batches = texts.story_batches(stories, tokenizer, batch_size=size, seed=seed)
    batches: Iterator[StoryBatch | TargetReading] = story_batches
    drafts: dict[str, Any]
    if is_dspark:
        drafts = {"dspark": feature_drafts.new_dspark(target, recipe.dspark_draft)}
        pupils = [Pupil(drafts["dspark"], partial(feature_drafts.dspark_loss, target, seed, drafts["dspark"]))]
    else:
        batches = map(partial(TargetReading.of, target), story_batches)
        drafts = {kind: feature_drafts.new_feature_draft(kind, target) for kind in kinds}
        pupils = [Pupil(draft, partial(feature_loss, draft), has_muon=False) for draft in drafts.values()]
    fit(
        pupils,
        batches,
        title=f"train {' and '.join(kinds)}",
        num_steps=settings.num_steps,
        learning_rate=settings.learning_rate,
        path=work / "checkpoint.pt",
        key=asdict(settings) | {"seed": seed},
    )
    held_out = texts.held_out(tokenizer, size, seed)
    for kind, draft in drafts.items():
        _write(draft, directory / kind, target, held_out)
    shutil.rmtree(work, ignore_errors=True)


def _write(
    draft: Eagle | Glide | DSpark, directory: Path, target: PreTrainedModel, batches: Sequence[StoryBatch]
) -> None:
    """Write a trained draft with its figures on these batches."""
    draft.bfloat16().float()  # rounded as it will be stored
    if isinstance(draft, DSpark):
        figures = feature_drafts.dspark_figures(draft, target, batches)
    else:
        figures = feature_drafts.feature_figures(draft, target, batches)
    feature_drafts.save_feature_draft(draft, directory)
    (directory / "figures.json").write_text(json.dumps(figures, indent=2, sort_keys=True) + "\n", encoding="utf-8")
    print(f"{directory.name}: {json.dumps(figures)}")


def _refuse_present(directory: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """Raise ValueError for models that are there, unless they may be overwritten and hold no other files."""
    present = [directory / name for name in names if (directory / name).exists()]
    if present and not overwrite:
        raise ValueError(f"{present[0]} exists; choose another directory, or overwrite it (--overwrite true)")
    for path in present:
        if others := {file.name for file in path.iterdir()} - _FILES if path.is_dir() else {path.name}:
            raise ValueError(f"{path} holds {min(others)}, which overwriting would delete; choose another directory")


def text_loss(model: LlamaForCausalLM, batch: StoryBatch) -> Float[Tensor, ""]:
    """-log p of the answers, in nats per token."""
    log_p = _log_probs(model, batch.ids[:, :-1], batch.is_learned)
    return functional.nll_loss(log_p, batch.ids[:, 1:][batch.is_learned])


def imitation_loss(model: LlamaForCausalLM, reading: TargetReading) -> Float[Tensor, ""]:
    """KL(p || q). Unlike total variation it spreads q out where the model does not know, and policies read that."""
    return reading.divergence(*log_q(model, reading))


def log_q(model: LlamaForCausalLM, reading: TargetReading) -> list[Float[Tensor, "learned vocab"]]:
    """log q at the learned positions, as `texts.acceptance_rates` takes it."""
    return [_log_probs(model, reading.tokens, reading.is_learned)]


def _log_probs(
    model: LlamaForCausalLM, tokens: Int[Tensor, "batch position"], is_learned: Bool[Tensor, "batch position"]
) -> Float[Tensor, "learned vocab"]:
    return model.lm_head(model.model(input_ids=tokens, use_cache=False).last_hidden_state[is_learned]).log_softmax(-1)


def _new_model(shape: Shape, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A model with random weights from torch's global generator."""
    num_layers, hidden_size, intermediate_size, num_heads = shape
    return LlamaForCausalLM(
        LlamaConfig(
            num_hidden_layers=num_layers,
            hidden_size=hidden_size,
            intermediate_size=intermediate_size,
            num_attention_heads=num_heads,
            vocab_size=len(tokenizer),
            max_position_embeddings=texts.MAX_TOKENS,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )
