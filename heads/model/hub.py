"""Heads and drafts from the hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from configs.paths import check_local
from configs.schema import ModelSource

FILES = ("config.json", "model.safetensors", "README.md")
"""Files of an exported head, and all that is fetched."""


def draft_directory(source: ModelSource) -> Path:
    """Folder with every file of a draft: itself if it is a path, else a snapshot of its repository.

    Raises:
        FileNotFoundError: nothing there, on this disk or on the hub, or the hub cannot be reached.
    """
    path = Path(source.path)
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(source.path, revision=source.revision))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no draft at {source.path!r}: there is no such directory, and the hub gives no such repository "
            f"({first_line(error)}); fetch it where there is a network, and name its directory as pair.draft.path"
        ) from error


def local_directory(source: str | Path, **where: Any) -> Path:
    """Folder with the files of `source`: itself if it is a path, else a snapshot of the repository of that name
    (owner/name).

    Args:
        source: a local file or directory, or a name on the hub.
        where: revision, token and what else `snapshot_download` takes.

    Raises:
        FileNotFoundError: nothing there, on this disk or on the hub, or the hub cannot be reached.
        ValueError: it is a URL.
    """
    check_local(source, "the path of a head", may_be_on_hub=True)
    path = Path(source)
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists():
        raise FileNotFoundError(
            f"no exported head at {path}; `acceptance-heads export` writes one directory per head of a sweep"
        )
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(FILES), **where))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no head at {str(source)!r}: there is no such directory, and the hub gives no such repository "
            f"({first_line(error)}); check "
            "the name, `hf auth login` for a private one, or fetch it where there is a network"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of a message that has any, else the kind of the error."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
