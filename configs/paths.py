"""Paths are those of this machine. A URL that is opened as a path makes a folder `s3:` here, and the run ends well; so
it is refused.

A URL begins with a scheme of at least two letters, a colon and a slash (`s3://bucket/run`, and what `pathlib` makes of
it, `s3:/bucket/run`); a drive (`C:/run`) and a name with a colon in it (`run:2/seed:0`) do not.
"""

import os
import re
from pathlib import Path, PurePath

_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]+):/+(.*)", re.DOTALL)
_LONGEST_NAME = 255


def check_local(value: object, name: str, *, may_be_on_hub: bool = False) -> None:
    """Raise ValueError for a URL, or for what cannot be a path.

    Args:
        value: a path, perhaps; anything but a string or a path (a setting that is null) passes.
        name: the name of the setting or flag, for the message.
        may_be_on_hub: the setting takes owner/name, too.
    """
    if isinstance(value, str | PurePath) and not _is_name(PurePath(value)):
        raise ValueError(
            f"{name} is {str(value)[:60]!r}, and no file can have such a name; give it a shorter or plainer one"
        )
    url = _URL.match(str(value)) if isinstance(value, str | PurePath) else None
    if url is None:
        return
    scheme, rest = url.groups()
    limit = "paths on this machine and hub ids (owner/name)" if may_be_on_hub else "paths on this machine"
    if scheme.lower() == "file":
        remedy = f"write the plain path, /{rest}"
    elif scheme.lower() == "hf" and may_be_on_hub:
        remedy = "write owner/name alone"
    else:
        remedy = f"mount what {scheme}:// leads to and name the mounted path, or copy it here"
    raise ValueError(f"{name} is {str(value)!r}, a URL, and only {limit} are taken; {remedy}")


def _is_name(path: PurePath) -> bool:
    return "\0" not in str(path) and all(len(os.fsencode(part)) <= _LONGEST_NAME for part in path.parts)


def local_path(value: str | PurePath, name: str) -> Path:
    """The path that a flag or an argument of this name gives.

    Raises:
        ValueError: it is a URL.
    """
    check_local(value, name)
    return Path(value)
