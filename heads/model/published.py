"""What a published head says of its origin: no path of this machine, and the license that its draft's card states."""

from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any

import yaml
from huggingface_hub import hf_hub_download, metadata_load

from store.hub import HUB_ERRORS


def portable(value: Any) -> Any:
    """JSON values in which each path that is valid on this machine alone (absolute, or from the home or parent
    directory) is replaced by its last part.
    """
    if isinstance(value, Mapping):
        return {key: portable(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [portable(item) for item in value]
    if isinstance(value, str) and value.startswith(("/", "~", "..")):
        return PurePath(value).name
    return value


def license_of(model: Mapping[str, object], *, may_download: bool = False) -> str | None:
    """The license in the card of a described model (`describe_model`, with its path): in its directory, or
    `may_download`, if it has a commit, from the hub; None if no license is stated there, or the hub cannot be reached.
    """
    if not model.get("path"):
        return None
    card = Path(str(model["path"]), "README.md")
    try:
        if may_download and model.get("commit"):
            card = Path(hf_hub_download(str(model["name"]), card.name, revision=str(model["commit"])))
        license = (metadata_load(card) or {}).get("license")
    except (*HUB_ERRORS, yaml.YAMLError):
        return None
    return None if license is None else str(license)
