"""How a valid document is broken: values of any kind, entries removed, bytes cut, flipped and inserted (for
`benchmarks.fuzz`).
"""

import json
import shutil
import struct
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import seed as seeded
from hypothesis import strategies as st

_MAX_LINE = 1500
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
    """Cut, flip or insert."""
    place = draw(st.integers(0, max(0, len(content) - 1)))
    how = draw(st.sampled_from(["cut", "flip", "insert", "nothing", "zeros"]))
    if how == "cut":
        return content[:place]
    if how == "flip" and content:
        return content[:place] + bytes([content[place] ^ 1 << draw(st.integers(0, 7))]) + content[place + 1 :]
    if how == "zeros":
        return content[:place] + bytes(len(content) - place)
    return b"" if how == "nothing" else content[:place] + draw(st.binary(min_size=1, max_size=8)) + content[place:]


def _break_json(content: bytes, draw: Draw) -> bytes:
    """Another value somewhere in the document, a key less, or broken bytes."""
    if draw(st.integers(0, 4)) == 0:
        return _break_bytes(content, draw)
    return json.dumps(_changed(json.loads(content), draw)).encode()


def _changed(value: Any, draw: Draw) -> Any:
    """The document with one entry changed or removed, on a random way down."""
    if isinstance(value, dict) and value and draw(st.integers(0, 5)):
        key = draw(st.sampled_from(sorted(value)))
        if draw(st.integers(0, 4)) == 0:
            return {name: entry for name, entry in value.items() if name != key}
        return {**value, key: _changed(value[key], draw)}
    if isinstance(value, list) and value and draw(st.integers(0, 5)):
        place = draw(st.integers(0, len(value) - 1))
        return [*value[:place], _changed(value[place], draw), *value[place + 1 :]]
    return draw(NASTY)


def _break_lines(content: bytes, draw: Draw) -> bytes:
    lines = content.splitlines()
    place = draw(st.integers(0, len(lines) - 1))
    return b"\n".join([*lines[:place], _break_json(lines[place], draw), *lines[place + 1 :]]) + b"\n"


def _break_safetensors(content: bytes, draw: Draw) -> bytes:
    """A broken header in front of the same numbers, or broken bytes."""
    if draw(st.integers(0, 3)) == 0:
        return _break_bytes(content, draw)
    (size,) = struct.unpack("<Q", content[:8])
    header = _break_json(content[8 : 8 + size], draw)
    return (
        struct.pack("<Q", draw(st.sampled_from([len(header), len(header) + 1, 2**63, 0])))
        + header
        + content[8 + size :]
    )


BROKEN = {"json": _break_json, "jsonl": _break_lines, "safetensors": _break_safetensors, "bytes": _break_bytes}


class Breakable(Protocol):
    """One file or setting to break: see `benchmarks.boundaries.Boundary`."""

    read: Callable[[], object]
    must_name: str | None

    def broken(self, draw: Draw) -> tuple[Path | None, bytes]: ...


def fuzz_boundary(boundary: Breakable, cases: int, seed: int) -> dict[str, Any]:
    """Break one boundary's input so many times."""
    outcomes: Counter[str] = Counter()
    failures: Counter[str] = Counter()

    @seeded(seed)
    @settings(
        max_examples=cases,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(st.data())
    def case(data: st.DataObject) -> None:
        outcome, failure = tried_break(boundary, data.draw)
        outcomes[outcome] += 1
        if failure:
            failures[failure] += 1

    case()
    found = {key: outcomes[key] for key in ("read", "refused", "failed")}
    return {"cases": sum(outcomes.values()), **found, "failures": dict(failures.most_common(12))}


def tried_break(boundary: Breakable, draw: Draw) -> tuple[str, str | None]:
    """Try one case; returns (read, refused or failed; what failed)."""
    path, intact = boundary.broken(draw)
    try:
        boundary.read()
        return "read", None
    except (ValueError, OSError) as error:
        line = " ".join(str(error).split())
        if boundary.must_name is not None and boundary.must_name not in line:
            return "failed", f"names no {boundary.must_name}: {line[:160]}"
        return ("refused", None) if 0 < len(line) <= _MAX_LINE else ("failed", f"a line of {len(line)} characters")
    except Exception as error:
        place = traceback.extract_tb(error.__traceback__)[-1]
        frame_of_ours = [
            frame for frame in traceback.extract_tb(error.__traceback__) if "site-packages" not in frame.filename
        ][-1]
        return (
            "failed",
            (
                f"{type(error).__name__} at {Path(frame_of_ours.filename).name}:{frame_of_ours.lineno} "
                f"({Path(place.filename).name}): "
                f"{str(error)[:90]}"
            ),
        )
    finally:
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.is_dir():
                shutil.rmtree(path)
            path.write_bytes(intact)
