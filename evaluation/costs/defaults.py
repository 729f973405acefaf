"""What `init` takes from the models: the sampling in the target's generation_config.json, and which one is larger."""

from collections.abc import Mapping
from pathlib import Path

from configs.schema import ModelSource, PairConfig, SamplingConfig
from data_gen.responses.settings import unmodelled
from lm.features.released import released_layout_of
from lm.pair import load_generation_config, without_weights

_FILE = "generation_config.json"
_NAMES = ("temperature", "top_p", "top_k")


def default_sampling(target: ModelSource, flags: Mapping[str, float | None]) -> tuple[SamplingConfig, list[str]]:
    """The sampling that flags set, and for those that are None the target's generation_config.json; and lines on what
    was taken from the file, and on what it has beyond `Sampling`. A top_p of 1 and a top_k of 0 keep all tokens.

    Args:
        target: the model.
        flags: temperature, top_p and top_k; None: not set.
    """
    generation = load_generation_config(target)
    settings = {} if generation is None else generation.to_dict()
    is_sampled = settings.get("do_sample") is not False and flags["temperature"] != 0
    taken: dict[str, float] = {}
    for name in _NAMES:
        value = settings.get(name)
        if is_sampled and flags[name] is None and value is not None and not _keeps_all(name, value):
            taken[name] = value
    chosen = {name: value for name, value in flags.items() if value is not None and not _keeps_all(name, value)}
    sampling = SamplingConfig(**chosen | taken)  # type: ignore[arg-type]
    lines = []
    if taken:
        lines.append(
            f"sampling: {_text(taken)}, from {_FILE} of {target.path}; --temperature, --top_p and --top_k choose "
            "another (--temperature 1 --top_p 1 --top_k 0: the model's own probabilities)"
        )
    if settings.get("do_sample") is False and flags["temperature"] is None:
        lines.append(f"note: {_FILE} of {target.path} has do_sample: false; for greedy decoding pass --temperature 0")
    if others := unmodelled(settings):
        lines.append(
            f"note: {_FILE} of {target.path} also has {_text(others)}, which data and heads do not model; serve the "
            "pair without, or other tokens are accepted than the heads learned"
        )
    return sampling, lines


def _keeps_all(name: str, value: object) -> bool:
    return (name == "top_p" and value == 1) or (name == "top_k" and value in (0, -1))


def _text(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{name} {value}" for name, value in settings.items())


def refuse_large_draft(pair: PairConfig) -> None:
    """Raise ValueError for a draft that is the target itself, or that has as many weights; no weights are loaded. A
    feature draft is part of its target.
    """
    if released_layout_of(pair.draft):
        return
    target = pair.target.path
    draft = pair.draft.path
    remedy = "or pass --allow_large_draft, for example to test a setup"
    if Path(target).resolve() == Path(draft).resolve():
        raise ValueError(
            f"--target and --draft are the same model, {target}, so drafting cannot be faster than the target alone; "
            f"pass a smaller model as --draft, {remedy}"
        )
    num_target = without_weights(pair.target).num_parameters()
    num_draft = without_weights(pair.draft).num_parameters()
    if num_draft >= num_target:
        raise ValueError(
            f"--draft {draft} has {num_draft:,} weights and --target {target} {num_target:,}, so drafting is no faster "
            f"than the target alone; the draft must be the smaller model: swap the two, {remedy}"
        )
