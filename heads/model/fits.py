"""Does a head fit the models and the sampling that it is about to be used with (law 4.1)?

A head predicts whether one target accepts one draft's tokens under one `Sampling`. Any other gives wrong
predictions that nothing downstream can notice, so every command checks this before it uses a head.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from huggingface_hub import constants
from huggingface_hub.file_download import repo_folder_name

from configs.schema import ModelSource
from data_gen.store.manifest import describe_model, same_model
from heads.model.head import Provenance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from lm import FeatureDraft

_REMEDY = "use a head that was trained for this run, or set decode.allow_foreign_heads to true"


def check_fits(
    trained: Provenance,
    name: str,
    *,
    draft: Mapping[str, Any] | None = None,
    target: Mapping[str, Any] | None = None,
    sampling: Mapping[str, Any] | None = None,
    remedy: str = _REMEDY,
) -> None:
    """Raise ValueError if a head was trained with another draft, target or sampling; what is unknown, or None, passes.

    Messages call the head `name` and end in `remedy`. Models are described by `describe_model` or `description_of`, and
    messages name them by `role` (such as pair.draft) if that is added; `sampling` has temperature, top_k and top_p.
    """
    for role, old, new in (("the draft", trained.draft, draft), ("the target", trained.target, target)):
        if new is not None and _differ(old, new):
            names = [str(facts.get("path") or facts.get("name") or "another model") for facts in (old, new)]
            if names[0] == names[1]:  # a model that was trained further
                keys = ("weights", "commit", "revision", "hidden_size")
                known = [next((f"{key} {of[key]}" for key in keys if of.get(key)), "unknown") for of in (old, new)]
                names = [f"{name} ({facts})" for name, facts in zip(names, known, strict=True)]
            role = new.get("role", role)
            raise ValueError(f"the head {name} was trained with {names[0]}, but {role} is {names[1]}; {remedy}")
    sampling = dict(sampling or {})
    if trained.sampling and any(trained.sampling.get(key) != value for key, value in sampling.items()):
        raise ValueError(
            f"the head {name} was trained for sampling {trained.sampling}, but this run has {sampling}; {remedy}"
        )


def description_of(model: "PreTrainedModel | FeatureDraft") -> dict[str, Any]:
    """Description of a model in memory; only the width is known of a model that was built from a config. The commit of
    one from the hub is known if transformers stored it (before 5.23), or if the cache has a single one.
    """
    path = model.name_or_path
    if path and Path(path).is_dir():
        return {"path": path, **describe_model(ModelSource(path=path))}
    known: dict[str, Any] = {}
    if path:
        commit = getattr(model.config, "_commit_hash", None) or _cached_commit(path)
        known = {"path": path, "name": path, "commit": commit}
    from lm import FeatureDraft

    width = model.hidden_size if isinstance(model, FeatureDraft) else model.config.get_text_config().hidden_size
    return {**known, "hidden_size": width}


def _cached_commit(name: str) -> str | None:
    """The commit of a hub model of which the cache has one version; None if it has several or none."""
    folder = Path(constants.HF_HUB_CACHE, repo_folder_name(repo_id=name, repo_type="model"), "snapshots")
    commits = [path.parent.name for path in folder.glob("*/config.json")]
    return commits[0] if len(commits) == 1 else None


def _differ(described: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Whether two descriptions are of different models; a key that one of them lacks is not compared.

    Hashes of the weights, or commits on the hub, recognise a copy under another path. Descriptions that share neither
    (a hub id and a local copy, or an imported head) are compared by the last part of their names and by revision.
    """
    shared = {key for key in ("hidden_size", "name", "revision") if described.get(key) and other.get(key)}
    if "hidden_size" in shared and described["hidden_size"] != other["hidden_size"]:
        return True
    if (same := same_model(described, other)) is not None:
        return not same
    if "name" in shared and Path(described["name"]).name != Path(other["name"]).name:
        return True
    return "revision" in shared and described["revision"] != other["revision"]
