"""Generations that a run of the hierarchies keeps on disk, so that it resumes and that `evaluation evaluate` and
`evaluation hierarchy` share them.

    DIR/manifest.json        what decides the tokens
    DIR/decoded.jsonl        prompt (a hash of its token ids), arm, setting and run (a hash of the machine and the code)
                             -> counts, draft lengths, seconds, repeats (`store.keyed`)

Hierarchies cannot be replayed from a trace: which tokens an inner verification drops depends on its draws. So they are
decoded, once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from functools import reduce
from hashlib import sha256
from operator import add
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from decode.loop.counts import Counts
from decode.loop.decoder import Generation
from store.keyed import KeyedStore


class Key(NamedTuple):
    """Key of one generation."""

    prompt: str
    arm: str
    setting: str
    run: str = ""
    """Digest of the machine, the code and how models are loaded, which decide the seconds."""


@dataclass(frozen=True)
class Decoded:
    """Counts and seconds of one generation."""

    counts: Counts
    lengths: tuple[int, ...]
    """Tokens handed to the target, per round."""
    seconds: float
    """Wall clock, the prompt included."""
    later: Counts
    """Without the round that reads the prompt."""
    later_draft_s: float
    """Seconds of drafting in the same rounds."""
    later_target_s: float
    """Seconds of verifying in them."""
    repeats: int = 1
    """TrioTimes that it was decoded, of which the seconds are medians."""

    @classmethod
    def of(cls, repeated: Sequence[Generation]) -> "Decoded":
        """The costs of a generation that was decoded several times, from one seed."""
        rounds = repeated[0].rounds
        return cls(
            counts=repeated[0].counts,
            lengths=tuple(len(round_.drafted) for round_ in rounds),
            seconds=median(
                sum(round_.draft_s + round_.target_s for round_ in repetition.rounds) for repetition in repeated
            ),
            later=reduce(add, (round_.counts for round_ in rounds[1:]), Counts()),
            later_draft_s=median(sum(round_.draft_s for round_ in repetition.rounds[1:]) for repetition in repeated),
            later_target_s=median(sum(round_.target_s for round_ in repetition.rounds[1:]) for repetition in repeated),
            repeats=len(repeated),
        )


def prompt_key(prompt_ids: Sequence[int]) -> str:
    """The same for the same tokens, whatever their prompt is called."""
    return sha256(repr(list(prompt_ids)).encode()).hexdigest()[:16]


def append_decoded(directory: Path, decoded: Mapping[Key, Decoded]) -> None:
    """Add generations, in one write."""
    _stored(directory).keep((key._asdict(), asdict(generation)) for key, generation in decoded.items())


def read_decoded(directory: Path) -> dict[Key, Decoded]:
    """Read all generations that are there.

    Raises:
        ValueError: a line that is no generation.
    """
    entries = _stored(directory).entries()
    # entries of earlier versions name no run
    return {Key(**key): _parsed(value) for key, value in entries if key.keys() == set(Key._fields)}


def _stored(directory: Path) -> KeyedStore:
    remedy = "delete the line, and its prompt is decoded again"
    return KeyedStore(directory / "decoded.jsonl", remedy=remedy, fields=[field.name for field in fields(Decoded)])


def _parsed(value: Mapping[str, Any]) -> Decoded:
    counts = {name: Counts(**value[name]) for name in ("counts", "later")}
    return Decoded(**{**value, **counts, "lengths": tuple(value["lengths"])})
