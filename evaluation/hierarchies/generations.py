"""Generations that a run of the hierarchies keeps on disk, so that it resumes and that `evaluation evaluate` and `evaluation hierarchy` share them.

    DIR/manifest.json        what decides the tokens
    DIR/decoded.jsonl        one generation a line: prompt (a hash of its token ids), arm, setting, counts, draft lengths, seconds, repeats

Hierarchies cannot be replayed from a trace: which tokens an inner verification drops depends on its draws. So they are decoded, once.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, fields
from functools import reduce
from hashlib import sha256
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from decode.loop.counts import Counts
from decode.loop.decoder import Generation
from store.json_files import parse_json


class Key(NamedTuple):
    """Which generation."""

    prompt: str
    arm: str
    setting: str


@dataclass(frozen=True)
class Decoded:
    """What one generation cost."""

    counts: Counts
    lengths: tuple[int, ...]
    """Tokens handed to the target, per round."""
    seconds: float
    """Wall clock, the prompt included."""
    later: Counts
    """Without the round that reads the prompt."""
    later_draft_s: float
    """Of the same rounds, drafting."""
    later_target_s: float
    """Verifying."""
    repeats: int = 1
    """Times that it was decoded, of which the seconds are medians."""

    @classmethod
    def of(cls, repeated: Sequence[Generation]) -> "Decoded":
        """The costs of a generation that was decoded several times, from one seed."""
        rounds = repeated[0].rounds
        return cls(
            counts=repeated[0].counts,
            lengths=tuple(len(one.drafted) for one in rounds),
            seconds=median(sum(one.draft_s + one.target_s for one in each.rounds) for each in repeated),
            later=reduce(add, (one.counts for one in rounds[1:]), Counts()),
            later_draft_s=median(sum(one.draft_s for one in each.rounds[1:]) for each in repeated),
            later_target_s=median(sum(one.target_s for one in each.rounds[1:]) for each in repeated),
            repeats=len(repeated),
        )


_FIELDS = (*Key._fields, *(field.name for field in fields(Decoded) if field.default is MISSING))
"""That a line must have: the first lines knew no repeats."""


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """The same for the same tokens, whatever their prompt is called."""
    return sha256(repr(list(prompt_ids)).encode()).hexdigest()[:16]


def append_decoded(directory: Path, decoded: Mapping[Key, Decoded]) -> None:
    """Add generations, in one write."""
    lines = [json.dumps(key._asdict() | asdict(one)) + "\n" for key, one in decoded.items()]
    with (directory / "decoded.jsonl").open("a", encoding="utf-8") as file:
        file.write("".join(lines))


def read_decoded(directory: Path) -> dict[Key, Decoded]:
    """What is there; a last line that a killed run left unfinished is cut off."""
    path = directory / "decoded.jsonl"
    if not path.is_file():
        return {}
    whole = path.read_bytes()
    finished = whole[: whole.rfind(b"\n") + 1]
    if len(finished) < len(whole):
        with path.open("r+b") as file:
            file.truncate(len(finished))
    remedy = "delete the line, and its prompt is decoded again"
    return dict(
        _parsed(parse_json(line, place=f"{path}:{number}", remedy=remedy, keys=_FIELDS))
        for number, line in enumerate(finished.splitlines(), start=1)
    )


def _parsed(line: dict[str, Any]) -> tuple[Key, Decoded]:
    key = Key(*(str(line.pop(name)) for name in Key._fields))
    counts, later = (Counts(**line.pop(name)) for name in ("counts", "later"))  # type: ignore[arg-type]
    return key, Decoded(counts=counts, later=later, lengths=tuple(line.pop("lengths")), **line)  # type: ignore[arg-type]
