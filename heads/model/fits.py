"""Whether a head fits the models and the sampling that it is about to be used with (law 4.1).

A head predicts one target's verdict on one draft's tokens under one `Sampling`. With another of the three it still
runs; only its predictions are wrong, and nothing downstream can notice. So there is this one check, at every entrance.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from configs.schema import ModelSource
from data_gen.store.identity import describe_model, same_model
from heads.model.head import AcceptanceHead
from lm import FeatureDraft

_REMEDY = "use a head that was trained for this run, or set decode.allow_foreign_heads to true"


def check_fits(
    head: AcceptanceHead,
    name: str,
    *,
    draft: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    remedy: str = _REMEDY,
) -> None:
    """Pass a head that was trained for this use, or that does not say what it was trained for.

    Args:
        head: with its provenance.
        name: what messages call it.
        draft: the model whose hidden states it is to read, as `describe_model` or `description_of` describes it, and
            optionally its `role`, what messages call it (such as pair.draft); None: not compared.
        target: the model whose verdict it is to predict, likewise.
        sampling: temperature, top_k, top_p; None: not compared.
        remedy: how messages end.

    Raises:
        ValueError: the head's provenance names another draft, another target or another sampling.
    """
    trained = head.provenance
    for role, trained_with, here in (("the draft", trained.draft, draft), ("the target", trained.target, target)):
        if here is not None and _differ(trained_with, here):
            old, new = _named_apart(trained_with, here)
            raise ValueError(
                f"the head {name} was trained with {old} where {here.get('role', role)} is {new}; {remedy}"
            )
    if (
        sampling is not None
        and trained.sampling
        and any(trained.sampling.get(key) != value for key, value in sampling.items())
    ):
        raise ValueError(
            f"the head {name} was trained for sampling {trained.sampling} and this run's is {dict(sampling)}; {remedy}"
        )


def description_of(model: PreTrainedModel | FeatureDraft) -> dict[str, Any]:
    """A model in memory, as far as it knows where it came from; one that was built from a config says nothing but its
    width.
    """
    path = model.name_or_path
    if path and Path(path).is_dir():
        return {"path": path, **describe_model(ModelSource(path=path))}
    known = {"path": path, "name": path, "commit": getattr(model.config, "_commit_hash", None)} if path else {}
    width = model.hidden_size if isinstance(model, FeatureDraft) else model.config.get_text_config().hidden_size
    return {**known, "hidden_size": width}


def _differ(described: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of different models; what one of them does not say is not held against it.

    The weights decide, or the commit on the hub: either recognises a copy under another path. Descriptions that share
    neither (a hub id and a local copy, or an imported head) are told apart by the last part of their names, and by
    their revisions.
    """
    if _both_say("hidden_size", described, other) and described["hidden_size"] != other["hidden_size"]:
        return True
    if (same := same_model(described, other)) is not None:
        return not same
    if _both_say("name", described, other) and Path(described["name"]).name != Path(other["name"]).name:
        return True
    return _both_say("revision", described, other) and described["revision"] != other["revision"]


def _both_say(key: str, described: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return bool(described.get(key)) and bool(other.get(key))


def _named_apart(described: Mapping[str, Any], other: Mapping[str, Any]) -> tuple[str, str]:
    """Paths of the two models; where both have one path (a model that was trained on), what identifies the weights as
    well.
    """
    old, new = (
        str(description.get("path") or description.get("name") or "another model") for description in (described, other)
    )
    if old != new:
        return old, new
    return f"{old} ({_exactly(described)})", f"{new} ({_exactly(other)})"


def _exactly(description: Mapping[str, Any]) -> str:
    keys = ("weights", "commit", "revision", "hidden_size")
    return next((f"{key} {description[key]}" for key in keys if description.get(key)), "unknown")
