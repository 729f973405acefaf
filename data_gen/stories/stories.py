"""Story problems and other small tasks with worked answers: the text of the embedded trio, and the prompts of its
experiments.

The sha256 of a prompt determines its split, so no prompt is in two splits, for any seed. The problems of one (split,
seed) form an endless sequence without repeated prompts; a longer run begins with a shorter one.
"""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count, islice
from random import Random

from data_gen.stories.kinds import KINDS

_SPLIT_SHARES = {"train": 80, "dev": 10, "test": 10}
"""Percent of all prompts."""


@dataclass(frozen=True)
class Story:
    """A task: its prompt and its worked answer."""

    id: str
    """Kind and hash of the prompt, the same in every run."""
    prompt: str
    answer: str
    """Step by step, with a last line `Answer: …`."""
    kind: str
    """A key of `kinds.KINDS`."""


def stories(split: str, num_stories: int, *, seed: int = 0) -> list[Story]:
    """The first `num_stories` problems of a split.

    Raises:
        ValueError: a negative number.
    """
    if num_stories < 0:
        raise ValueError(f"num_stories is {num_stories}; it must be at least 0")
    return list(islice(story_stream(split, seed), num_stories))


def split_of(prompt: str) -> str:
    """The split to which a prompt belongs."""
    percent = int.from_bytes(hashlib.sha256(prompt.encode()).digest()[:8], "big") % 100
    for split, share in _SPLIT_SHARES.items():
        if percent < share:
            return split
        percent -= share
    raise AssertionError("the shares add up to 100")


def story_stream(split: str, seed: int) -> Iterator[Story]:
    """An endless sequence of problems of one split, without repetitions."""
    assert split in _SPLIT_SHARES, split
    known_ids = set()
    for index in count():
        story = _candidate(Random(f"{split}/{seed}/{index}"))
        if story.id not in known_ids and split_of(story.prompt) == split:
            known_ids.add(story.id)
            yield story


def _candidate(rng: Random) -> Story:
    """One problem of any kind and split."""
    (kind,) = rng.choices(list(KINDS), [share for _, share in KINDS.values()])
    prompt, answer = KINDS[kind][0](rng)
    return Story(f"{kind}-{hashlib.sha256(prompt.encode()).hexdigest()[:12]}", prompt, answer, kind)
