"""How long the timing of a machine takes, said before it begins: what is timed, about how long, and how to skip it.

The estimate is the seconds of one generation times the generations to come. Those with drafts of other lengths take
other times, so that it is good for the decision to wait, and for nothing else.
"""

from collections.abc import Sequence
from time import perf_counter

import torch

from data_gen.pipeline.plan import duration
from decode.policies import FixedLength
from evaluation.costs.measure import Loop, num_generations
from evaluation.costs.stops import STEPS, TOKENS, most_generations

SKIP = "--decode.t_draft_s SECONDS --decode.t_target_s SECONDS --decode.stop_share size"


def num_timed(num_prompts: int, num_kinds: int, *, max_draft_length: int, has_forwards: bool = True) -> tuple[int, int]:
    """(generations for t_draft and t_target, generations for the stops at most).

    Args:
        num_prompts: prompts that are generated from.
        num_kinds: kinds of stop that are timed.
        max_draft_length: the longest draft, which bounds the lengths that are timed.
        has_forwards: t_draft and t_target are timed too; False where they are known.
    """
    forwards = num_generations(num_prompts, max_draft_length) if has_forwards else 0
    return forwards, most_generations(num_kinds, num_prompts)


def what_is_timed(generations: Sequence[int], num_kinds: int) -> str:
    """The counts of `num_timed` in words: "64 generations for t_draft and t_target, at most 360 for 14 kinds of
    stop".
    """
    forwards, stops = generations
    parts = [f"{forwards} generations for t_draft and t_target"] if forwards else []
    parts += [f"at most {stops} generations for {num_kinds} kinds of stop"] if stops else []
    return ", ".join(parts)


def expected_s(loop: Loop, generations: Sequence[int]) -> float:
    """Seconds that the generations will take, about: from two that are timed here, one without drafts, the slowest,
    and one with the drafts that stops are timed on, each after a warm-up.
    """
    num_tokens, seconds = min(TOKENS, loop.max_new_tokens), []
    for length in (0, min(STEPS, loop.max_draft_length)):
        decoder = loop.decoder(FixedLength(length))
        for _ in range(2):
            started_s = perf_counter()
            decoder.generate(loop.prompts[0], num_tokens, generator=torch.Generator().manual_seed(0))
        seconds.append(perf_counter() - started_s)
    forwards, stops = generations
    return forwards * sum(seconds) / 2 * loop.max_new_tokens / num_tokens + stops * seconds[1]


def warning_of(loop: Loop, num_kinds: int, *, has_forwards: bool, kept_in: str) -> str:
    """What a user reads before the timing of a loop begins, in three lines.

    Args:
        loop: the loop that will be timed.
        num_kinds: kinds of stop that are timed.
        has_forwards: t_draft and t_target are timed too.
        kept_in: the file that keeps the times.
    """
    generations = num_timed(
        len(loop.prompts), num_kinds, max_draft_length=loop.max_draft_length, has_forwards=has_forwards
    )
    about = duration(expected_s(loop, generations))
    return (
        f"costs: timing this machine, about {about}: {what_is_timed(generations, num_kinds)}\n"
        f"costs: done once, kept in {kept_in}; other work on the machine meanwhile bends the times\n"
        f"costs: to skip it, give the times: {SKIP}"
    )
