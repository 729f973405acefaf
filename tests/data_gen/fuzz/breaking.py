"""How a valid document is broken: values of any kind, entries removed, bytes cut, flipped and inserted."""

import json
import struct
from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

Draw = Callable[[st.SearchStrategy[Any]], Any]
NASTY = st.one_of(
    st.sampled_from([None, True, False, 0, -1, 1, 10**20, 1e308, float("nan"), float("inf")]),
    st.sampled_from(["", " ", "x", "\ud800", "\0", "../x", [], {}, [[]], [None]]),
    st.integers(-(2**70), 2**70),
    st.text(max_size=8),
    st.lists(st.one_of(st.integers(), st.booleans(), st.none(), st.text(max_size=3)), max_size=3),
    st.dictionaries(st.text(max_size=4), st.integers(), max_size=2),
)


def _break_bytes(content: bytes, draw: Draw) -> bytes:
    at = draw(st.integers(0, max(0, len(content) - 1)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "nothing", "zeros"]))
    if how == "cut":
        return content[:at]
    if how == "flip" and content:
        return content[:at] + bytes([content[at] ^ 1 << draw(st.integers(0, 7))]) + content[at + 1 :]
    if how == "zeros":
        return content[:at] + bytes(len(content) - at)
    return b"" if how == "nothing" else content[:at] + draw(st.binary(min_size=1, max_size=8)) + content[at:]


def _break_json(content: bytes, draw: Draw) -> bytes:
    if draw(st.integers(0, 4)) == 0:
        return _break_bytes(content, draw)
    return json.dumps(_changed(json.loads(content), draw)).encode()


def _changed(value: Any, draw: Draw) -> Any:
    """The document with one random entry, at any depth, changed or removed."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        at = draw(st.integers(0, len(value) - 1))
        return [*value[:at], _changed(value[at], draw), *value[at + 1 :]]
    return draw(NASTY)


def _break_lines(content: bytes, draw: Draw) -> bytes:
    lines = content.splitlines()
    at = draw(st.integers(0, len(lines) - 1))
    return b"\n".join([*lines[:at], _break_json(lines[at], draw), *lines[at + 1 :]]) + b"\n"


def _break_safetensors(content: bytes, draw: Draw) -> bytes:
    """A broken header before the same numbers, or broken bytes."""
    if draw(st.integers(0, 3)) == 0:
        return _break_bytes(content, draw)
    (size,) = struct.unpack("<Q", content[:8])
    header = _break_json(content[8 : 8 + size], draw)
    length = draw(st.sampled_from([len(header), len(header) + 1, 2**63, 0]))
    return struct.pack("<Q", length) + header + content[8 + size :]


BROKEN = {"json": _break_json, "jsonl": _break_lines, "safetensors": _break_safetensors, "bytes": _break_bytes}
