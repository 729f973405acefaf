"""The recipe of the embedded trio `checkpoints/tiny/{target,draft,micro}`: `python -m checkpoints.recipes`.

Three Llama-architecture models with one tokenizer, trained on `data_gen.stories.stories` alone:

    target   deep and narrow: learns to work things out. Cross-entropy on the worked answers.
    draft    one layer: learns the phrases. Distilled from the target: KL(p || q) at each answer position. (To look a
             word up in the prompt takes two layers. A draft with a second layer learns that too, is accepted 95 % of
             the time, and leaves little to predict.)
    micro    one layer, much narrower: the same, for hierarchies of three.

Feature drafts for the target, `checkpoints/tiny/{eagle,glide,dspark}`, come after it
(`checkpoints.recipes.feature_drafts`, `checkpoints.recipes.dspark`).

Distillation is what makes free choices of wording agree: both models are then equally unsure there, and a token drawn
from q is accepted although its entropy is high; where something has to be worked out, p is nearly one-hot and q is
spread. On a CPU a forward of one token costs one fixed part and one part per layer, so depth, not width, sets t_target
/ t_draft.

Same seed, recipe, machine and thread count give the same bytes. The models learn in float32 and are stored in bfloat16.
"""

import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from checkpoints.recipes.dspark import Blocks, dspark_pupil, figures_of, new_dspark, save_dspark
from checkpoints.recipes.feature_drafts import (
    FEATURE_DRAFTS,
    TargetReading,
    acceptance_rates,
    feature_pupil,
    new_feature_draft,
    save_feature_draft,
)
from checkpoints.recipes.figures import NAMES, measure, report_figures
from checkpoints.recipes.fit import Course, fit
from checkpoints.recipes.tokenizer import MAX_TOKENS, train_tokenizer
from checkpoints.recipes.training import StoryBatch, encode_story, imitator, read_by, story_batches, writer
from configs.paths import local_path
from configs.schema import ModelSource
from data_gen.stories.stories import Story, stories, story_stream
from lm import load_model, load_tokenizer
from store.progress import Bar
from store.shards import atomic_directory

_FILES = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
_FILES |= {"chat_template.jinja", "figures.json"}
"""Files of a model's directory; a directory with anything else is never overwritten."""
_STORY_SEED = 1 << 32  # added to the seed, so that experiments (0, 1, …) train heads on other stories than the trio


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Size of one model."""

    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything but seed and machine that decides the trio's bytes."""

    target: ModelShape = ModelShape(num_layers=10, hidden_size=128, intermediate_size=352, num_heads=4)
    draft: ModelShape = ModelShape(num_layers=1, hidden_size=96, intermediate_size=256, num_heads=3)
    micro: ModelShape = ModelShape(num_layers=1, hidden_size=24, intermediate_size=64, num_heads=1)
    vocab_size: int = 768
    num_tokenizer_stories: int = 4000
    batch_size: int = 16
    target_steps: int = 2000
    distil_steps: int = 1200
    target_learning_rate: float = 4e-3
    distil_learning_rate: float = 4e-3
    feature_draft_batch_size: int = 8
    feature_draft_steps: int = 400
    feature_draft_learning_rate: float = 4e-3
    dspark: Blocks = field(default_factory=Blocks)
    num_threads: int = 1  # more would gain little, since the models are small


def make_trio(
    out_dir: str | Path, *, seed: int = 0, recipe: Recipe | None = None, overwrite: bool = False
) -> dict[str, float]:
    """Train the trio, write it under `out_dir` once all three are trained, and measure it on the test split.

    Raises:
        ValueError: a model is there already and `overwrite` is off.
    """
    recipe, out_dir = recipe or Recipe(), local_path(out_dir, "--dir")
    _refuse_present(out_dir, NAMES, overwrite=overwrite)
    torch.set_num_threads(recipe.num_threads)
    models, tokenizer = _train_trio(seed, recipe)
    for name, model in models.items():
        with atomic_directory(out_dir / name) as folder:
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
    figures = measure(out_dir)
    print(report_figures(figures))
    return figures


def make_feature_drafts(
    out_dir: str | Path, *, seed: int = 0, recipe: Recipe | None = None, overwrite: bool = False
) -> dict[str, float]:
    """Train the feature drafts for `out_dir`/target, write them beside it, and measure them on the test split.

    Raises:
        FileNotFoundError: there is no target.
        ValueError: a draft is there already and `overwrite` is off.
    """
    recipe, out_dir = recipe or Recipe(), local_path(out_dir, "--dir")
    target, tokenizer = _begin(out_dir, FEATURE_DRAFTS, seed, recipe, overwrite=overwrite)
    drafts = {kind: new_feature_draft(kind, target) for kind in FEATURE_DRAFTS}
    size, num_steps = recipe.feature_draft_batch_size, recipe.feature_draft_steps
    fit(
        [feature_pupil(draft) for draft in drafts.values()],
        _stories_for(tokenizer, size, num_steps, seed),
        Course("teach eagle and glide", num_steps, recipe.feature_draft_learning_rate),
        read=partial(TargetReading.of, target),
    )
    for kind, draft in drafts.items():
        save_feature_draft(draft, out_dir / kind)
    held_out = _held_out(tokenizer, size, seed)
    figures = {
        f"{kind}_acceptance_mean_{depth}": rate
        for kind, draft in drafts.items()
        for depth, rate in enumerate(acceptance_rates(draft, target, held_out), 1)
    }
    print(report_figures(figures))
    return figures


def make_dspark(
    out_dir: str | Path, *, seed: int = 0, recipe: Recipe | None = None, overwrite: bool = False
) -> dict[str, Any]:
    """Train a DSpark draft for `out_dir`/target with its confidence head, and write it beside the target; resumes.

    Raises:
        FileNotFoundError: there is no target.
        ValueError: a draft is there already and `overwrite` is off, or the run to be resumed is another one.
    """
    recipe, out_dir = recipe or Recipe(), local_path(out_dir, "--dir")
    target, tokenizer = _begin(out_dir, ("dspark",), seed, recipe, overwrite=overwrite)
    shape, work = recipe.dspark, out_dir / "dspark-work"
    draft = new_dspark(target, shape)
    pupil = dspark_pupil(draft, target, num_anchors=shape.num_anchors, seed=seed)
    course = Course("teach dspark", shape.num_steps, shape.learning_rate, work, asdict(shape) | {"seed": seed})
    fit([pupil], _stories_for(tokenizer, shape.batch_size, shape.num_steps, seed), course)
    figures = figures_of(draft.bfloat16().float(), target, _held_out(tokenizer, shape.batch_size, seed))
    save_dspark(draft, out_dir / "dspark", figures)
    shutil.rmtree(work, ignore_errors=True)
    print(json.dumps(figures))
    return figures


def _begin(
    out_dir: Path, names: Iterable[str], seed: int, recipe: Recipe, *, overwrite: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The embedded target, frozen, and its tokenizer, for drafts that are not there yet."""
    _refuse_present(out_dir, names, overwrite=overwrite)
    source = ModelSource(path=str(out_dir / "target"), dtype="float32", device_map="cpu")
    target, tokenizer = load_model(source), load_tokenizer(source)
    torch.set_num_threads(recipe.num_threads)
    torch.manual_seed(seed)
    return target.requires_grad_(False), tokenizer


def _stories_for(
    tokenizer: PreTrainedTokenizerBase, batch_size: int, num_steps: int, seed: int
) -> Callable[[int], Iterator[StoryBatch]]:
    """Batches of new stories from a step on."""
    rows = [encode_story(story, tokenizer) for story in _new_stories(seed, batch_size * num_steps)]
    how = {"batch_size": batch_size, "seed": seed, "pad_id": tokenizer.pad_token_id}
    return lambda start: islice(story_batches(rows, **how), start, None)


def _held_out(tokenizer: PreTrainedTokenizerBase, batch_size: int, seed: int) -> list[StoryBatch]:
    """Some stories of the test split."""
    rows = [encode_story(story, tokenizer) for story in stories("test", 256, seed=seed)]
    return list(islice(story_batches(rows, batch_size=batch_size, seed=seed, pad_id=tokenizer.pad_token_id), 8))


def _refuse_present(out_dir: Path, names: Iterable[str], *, overwrite: bool) -> None:
    """Raise ValueError for models that are there, unless they may be overwritten and hold nothing else."""
    present = [name for name in names if (out_dir / name).exists()]
    if present and not overwrite:
        raise ValueError(f"{out_dir / present[0]} exists; choose another directory, or overwrite it (--overwrite true)")
    for path in (out_dir / name for name in present):
        if foreign := {file.name for file in path.iterdir()} - _FILES if path.is_dir() else {path.name}:
            raise ValueError(
                f"{path} holds {sorted(foreign)[0]}, which overwriting would delete; choose another directory"
            )


def _new_stories(seed: int, num_stories: int) -> list[Story]:
    stream = islice(story_stream("train", _STORY_SEED + seed), num_stories)
    return list(Bar(stream, desc="write stories", total=num_stories, unit="stories"))


def _train_trio(seed: int, recipe: Recipe) -> tuple[dict[str, LlamaForCausalLM], PreTrainedTokenizerBase]:
    """The three models, in bfloat16, and their tokenizer: the target is trained, and the others distilled from it."""
    torch.manual_seed(seed)
    stories = _new_stories(seed, recipe.batch_size * max(recipe.target_steps, recipe.distil_steps))
    tokenizer = train_tokenizer(stories[: recipe.num_tokenizer_stories], recipe.vocab_size)
    rows = [encode_story(story, tokenizer) for story in Bar(stories, desc="tokenize", unit="stories")]
    models = {
        name: _new_model(shape, tokenizer)
        for name, shape in zip(NAMES, (recipe.target, recipe.draft, recipe.micro), strict=True)
    }
    source = story_batches(rows, batch_size=recipe.batch_size, seed=seed, pad_id=tokenizer.pad_token_id)
    target, *others = models.values()
    course = Course("train target", recipe.target_steps, recipe.target_learning_rate)
    fit([writer(target)], lambda start: source, course)
    target.bfloat16().float()  # rounded as it will be stored, so that the others learn from the target that is shipped
    course = Course("distil draft and micro", recipe.distil_steps, recipe.distil_learning_rate)
    fit([imitator(model) for model in others], lambda start: source, course, read=read_by(target))
    for model in models.values():
        model.bfloat16()
    return models, tokenizer


def _new_model(shape: ModelShape, tokenizer: PreTrainedTokenizerBase) -> LlamaForCausalLM:
    """A model with random weights from torch's global generator."""
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        max_position_embeddings=MAX_TOKENS,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return LlamaForCausalLM(config)
