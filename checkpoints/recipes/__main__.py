"""`python -m checkpoints.recipes`: train the embedded models again (target, draft, micro, and the feature drafts of the
target). `… dspark`: the DSpark draft among them alone. `… smollm2` and `… coder_pair`: make directories of published
models without a hub. `… eagle3` and `… small`: train a draft for your own model. `… record`: a trace without prompts.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Literal

import torch
from transformers import PreTrainedModel

from checkpoints.recipes.coder_pair import coder_pair
from checkpoints.recipes.learning import Distillation, Draft, learn
from checkpoints.recipes.readings import apart, feature_sizes, likeliest_tokens, read_target, texts_of
from checkpoints.recipes.recipe import make_dspark, make_feature_drafts, make_trio
from checkpoints.recipes.record import record
from checkpoints.recipes.reduced import Reduced
from checkpoints.recipes.small import Small, SmallShape
from checkpoints.recipes.smollm2 import smollm2
from configs.command import run
from configs.paths import local_path
from configs.schema import ModelSource
from lm import load_model, load_tokenizer
from store.shards import write_atomic


def tiny(
    *,
    dir: str = "checkpoints/tiny",
    seed: int = 0,
    models: Literal["all", "trio", "feature_drafts"] = "all",
    overwrite: bool = False,
) -> None:
    """Train the embedded models anew: about 30 minutes on one core.

    Args:
        dir: the folder that gets target, draft and micro, eagle, glide and dspark.
        seed: decides the weights and the stories.
        models: trio is target, draft and micro; feature_drafts are an EAGLE, a GliDe and a DSpark draft for the target
            that is there.
        overwrite: replace models that are there already.
    """
    if models != "feature_drafts":
        make_trio(dir, seed=seed, overwrite=overwrite)
    if models != "trio":
        make_feature_drafts(dir, seed=seed, overwrite=overwrite)
        make_dspark(dir, seed=seed, overwrite=overwrite)


def dspark(*, dir: str = "checkpoints/tiny", seed: int = 0, overwrite: bool = False) -> None:
    """Train a small DSpark draft with its confidence head for the embedded target, minutes on one core; resumes.

    Args:
        dir: the folder that has target, and gets dspark; dspark-work beside it keeps what is not finished.
        seed: decides the weights and the stories.
        overwrite: replace a draft that is there already.
    """
    make_dspark(dir, seed=seed, overwrite=overwrite)


def eagle3(
    *,
    target: str,
    responses: str,
    out: str,
    vocab_size: int = 8192,
    num_epochs: int = Distillation.num_epochs,
    num_deep_epochs: int = Distillation.num_deep_epochs,
    learning_rate: float = Distillation.learning_rate,
) -> None:
    """Teach an EAGLE-3 draft with a reduced vocabulary on responses of a target, which is read once; resumes.

    Args:
        target: directory of the target.
        responses: the target's own responses, a file of `acceptance-heads responses`; of the last 128 some are held
            out, and other responses to their prompts are not taught.
        out: the folder that gets the draft; OUT-work beside it keeps what is not finished, OUT-readings the readings.
        vocab_size: tokens that the draft can say; the target's likeliest.
        num_epochs: times that the readings are learned from.
        num_deep_epochs: the last of them, which teach three depths; those before teach the first token of drafts.
        learning_rate: the peak.
    """
    directory, model, paths, layer_ids = _read(target, responses, out)
    distillation = Distillation(num_epochs=num_epochs, num_deep_epochs=num_deep_epochs, learning_rate=learning_rate)
    torch.manual_seed(distillation.seed)
    ids = likeliest_tokens(paths[:-1], vocab_size, vocab_size=model.config.get_text_config().vocab_size)
    draft = Reduced(model, layer_ids, ids, feature_sizes(paths[0]))
    _teach(draft, directory, paths, distillation, draft.save)


def small(
    *,
    target: str,
    responses: str,
    out: str,
    hidden_size: int = SmallShape.hidden_size,
    num_layers: int = SmallShape.num_layers,
    num_epochs: int = Distillation.num_epochs,
    learning_rate: float = 1e-3,
) -> None:
    """Teach a small Llama with the target's vocabulary on responses of a target, which is read once; resumes.

    Args:
        target: directory of the target.
        responses: the target's own responses, as for `eagle3`.
        out: the folder that gets the draft; OUT-work beside it keeps what is not finished, OUT-readings the readings.
        hidden_size: width of the draft, a multiple of 64.
        num_layers: layers of the draft.
        num_epochs: times that the readings are learned from.
        learning_rate: the peak.
    """
    directory, model, paths, _ = _read(target, responses, out)
    distillation = Distillation(num_depths=1, num_epochs=num_epochs, learning_rate=learning_rate, batch_size=8)
    torch.manual_seed(distillation.seed)
    draft = Small(model, SmallShape(hidden_size=hidden_size, num_layers=num_layers, intermediate_size=4 * hidden_size))
    tokenizer = load_tokenizer(ModelSource(path=target))
    _teach(draft, directory, paths, distillation, lambda folder: draft.save(folder, tokenizer))


def _read(target: str, responses: str, out: str) -> tuple[Path, PreTrainedModel, list[Path], tuple[int, ...]]:
    """The folder of the draft, the target in float32, the shards of its readings, and the layers that they are of."""
    directory, model = Path(local_path(out, "--out")), load_model(ModelSource(path=target))
    num_layers = model.config.get_text_config().num_hidden_layers
    layer_ids = (2, num_layers // 2, num_layers - 3)
    told = texts_of(Path(local_path(responses, "--responses")))
    texts = apart(told)
    if len(texts) < len(told):
        print(f"{len(told) - len(texts)} of {len(told)} responses answer a prompt of those held out, and are left out")
    paths = read_target(model, texts, _beside(directory, "readings"), layer_ids=layer_ids)
    return directory, model.float().requires_grad_(False), paths, layer_ids


def _beside(directory: Path, name: str) -> Path:
    return directory.with_name(f"{directory.name}-{name}")


def _teach(
    draft: Draft, directory: Path, paths: list[Path], distillation: Distillation, save: Callable[[Path], None]
) -> None:
    """Teach a draft and write it with its figures."""
    figures = learn(draft, paths, _beside(directory, "work"), distillation)
    save(directory)
    write_atomic(directory / "figures.json", json.dumps(figures, indent=1).encode())
    rates = ", ".join(f"{rate:.3f}" for rate in figures["acceptance_rates"])
    print(f"{directory}: acceptance_rate on held-out texts, depth by depth: {rates}")


if __name__ == "__main__":
    run(
        {
            "tiny": tiny,
            "dspark": dspark,
            "smollm2": smollm2,
            "coder_pair": coder_pair,
            "eagle3": eagle3,
            "small": small,
            "record": record,
        },
        default="tiny",
    )
