"""Heads and drafts from the hub."""

from pathlib import Path
from typing import Any

from huggingface_hub import snapshot_download

from configs.paths import check_local
from configs.schema import ModelSource

FILES = ("config.json", "model.safetensors", "README.md")
"""Files of an exported head; no others are downloaded."""


def draft_directory(source: ModelSource) -> Path:
    """The directory of a draft; a hub id is downloaded.

    Raises:
        FileNotFoundError: neither a local directory nor a repository that can be downloaded.
    """
    path = Path(source.path)
    if path.is_dir():
        return path
    try:
        return Path(snapshot_download(source.path, revision=source.revision))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no draft at {source.path!r}: no such directory, and the download from the hub failed "
            f"({first_line(error)}); set pair.draft.path to a local directory, or run where the hub can be reached"
        ) from error


def local_directory(source: str | Path, **where: Any) -> Path:
    """The local path of a head; a hub id (owner/name) is downloaded.

    Args:
        source: a local file or directory, or a hub id.
        where: revision, token and other arguments of `snapshot_download`.

    Raises:
        FileNotFoundError: neither a local path nor a repository that can be downloaded.
        ValueError: a URL.
    """
    check_local(source, "the path of a head", may_be_on_hub=True)
    path = Path(source)
    if path.exists():
        return path
    if path.is_absolute() or len(path.parts) != 2 or path.parent.exists():
        raise FileNotFoundError(
            f"no exported head at {path}; run `acceptance-heads export`, which writes one directory per head of a sweep"
        )
    try:
        return Path(snapshot_download(str(source), allow_patterns=list(FILES), **where))
    except (OSError, ValueError) as error:
        raise FileNotFoundError(
            f"no head at {str(source)!r}: no such directory, and the download from the hub failed "
            f"({first_line(error)}); check the name, run `hf auth login` for a private one, or name a local directory"
        ) from error


def first_line(error: Exception) -> str:
    """The first line of an error's message, or its type if the message is empty."""
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
