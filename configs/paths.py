"""Refuses URLs where a path on this machine is expected: opened as a path, `s3://…` would become a local folder `s3:`.

A URL begins with a scheme of at least two letters, a colon and a slash (`s3://bucket/run`, or `s3:/bucket/run` after
`pathlib`). A drive (`C:/run`) and a name with a colon (`run:2/seed:0`) are not URLs.
"""

import os
import re
from pathlib import Path, PurePath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_LONGEST_NAME = 255


def check_local(value: object, name: str, *, may_be_on_hub: bool = False) -> None:
    """Raise ValueError, which names the setting or flag, for a URL, a string that cannot be a path, or a loaded model;
    null passes. `may_be_on_hub`: it also takes owner/name.
    """
    if hasattr(value, "save_pretrained"):
        raise ValueError(
            f"{name} is a {type(value).__name__}, but must be a path; save it with save_pretrained and give that "
            "directory, or pass it to data_gen.make_data"
        )
    if not isinstance(value, str | PurePath):
        return
    text = str(value)
    if not text.strip() or "\0" in text or max(len(os.fsencode(part)) for part in text.split("/")) > _LONGEST_NAME:
        raise ValueError(
            f"{name} is {text[:60]!r}, not a valid file name; use names of 1 to {_LONGEST_NAME} bytes without null "
            "characters"
        )
    if (url := _URL.match(text)) is None:
        return
    scheme, rest = url.groups()
    limit = "a local path or a hub id (owner/name)" if may_be_on_hub else "a local path"
    if scheme.lower() == "file":
        remedy = f"write the path alone, /{rest}"
    elif scheme.lower() == "hf" and may_be_on_hub:
        remedy = "write owner/name alone"
    else:
        remedy = f"mount the {scheme}:// storage and give the mounted path, or copy the data to this machine"
    raise ValueError(f"{name} is {text!r}, a URL, but must be {limit}; {remedy}")


def local_path(value: str | PurePath, name: str) -> Path:
    """The path that a flag or an argument gives; ValueError for a URL."""
    check_local(value, name)
    return Path(value)
