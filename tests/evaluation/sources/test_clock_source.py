"""Arms take turns, are stored prompt by prompt and resume; what they did is `Played` with the seconds of the clock."""

from dataclasses import replace
from functools import partial
from itertools import count

import numpy as np
import pytest

from decode.loop.counts import Counts
from decode.policies import FixedLength
from evaluation.costs.measure import Loop
from evaluation.played import joined, latency_of
from evaluation.sources.clock import (
    Clocked,
    StoredRuns,
    clock_generation,
    clock_in_turns,
    clock_within,
    generations_of,
    median_of,
    played_of,
)
from lm import RandomSampler, Sampling
from store.json_files import KeyedStore
from tests.toys.small_pair import PROMPTS

SPEEDS = {"alone": 1.0, "k=1": 2.0, "k=2": 4.0}
WARM_UP = 99


def raced(path, *, run="run", repeats=1, stops_after=None):
    """Six prompts: (texts in the order in which they were written, generations by arm and prompt)."""
    texts: list[tuple[str, int]] = []

    def generations_of(name, speed):
        def written(number: int) -> Clocked:
            if stops_after is not None and len(texts) >= stops_after:
                raise KeyboardInterrupt
            texts.append((name, number))
            counts = Counts(num_emitted=6 + number)
            return Clocked(counts=counts, whole_s=(6 + number) / speed, first_token_s=1 / speed)

        return written

    arms = {name: generations_of(name, speed) for name, speed in SPEEDS.items()}
    store = StoredRuns(KeyedStore(path / "clock.jsonl", remedy=""), run)
    prompts = {str(number): number for number in range(6)}
    return texts, clock_in_turns(arms, prompts, desc="race", store=store, repeats=repeats, warm_up=WARM_UP)


def test_a_clock_that_was_stopped_resumes_with_its_next_prompt(tmp_path):
    whole, runs = raced(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        raced(tmp_path / "cut", stops_after=3 + 3 * 3 + 1)  # a warm-up, three prompts, and an arm of the fourth
    rest, same = raced(tmp_path / "cut")
    assert same == runs
    assert rest[3:] == whole[3 + 3 * 3 :], "the prompt that was cut runs whole, the others not again"
    assert raced(tmp_path / "cut") == ([], runs)
    assert raced(tmp_path / "cut", run="another")[0] == whole
    assert len(raced(tmp_path / "cut", repeats=2)[0]) == 3 + 6 * 3 * 2, "one repeat is not two"


def test_arms_rotate_and_warm_up_before_anything_is_timed(tmp_path):
    texts, runs = raced(tmp_path, repeats=2)
    names = list(SPEEDS)
    assert texts[:3] == [(name, WARM_UP) for name in names]
    turns = [texts[start : start + 3] for start in range(3, len(texts), 3)]
    assert [turn[0] for turn in turns[:4]] == [(names[0], 0), (names[1], 0), (names[1], 1), (names[2], 1)]
    assert all({name for name, _ in turn} == set(names) for turn in turns)
    assert [run.whole_s for run in runs["k=2"]] == [(6 + number) / 4 for number in range(6)]
    assert runs["alone"][0].repeats == 2


def test_a_clock_with_a_budget_takes_turns_until_it_is_used_up(monkeypatch):
    texts: list[tuple[str, int]] = []

    def generations_of(name):
        def written(number: int) -> Clocked:
            texts.append((name, number))
            return Clocked(counts=Counts(num_emitted=number), whole_s=1.0, first_token_s=0.5)

        return written

    monkeypatch.setattr("evaluation.turns.perf_counter", partial(next, count()))  # a second each time
    arms = {name: generations_of(name) for name in SPEEDS}
    runs = clock_within(3.5, arms, lambda turn: 10 * turn, fewest=2, desc="race")
    names = list(SPEEDS)
    assert texts[:3] == [(name, 0) for name in names], "a warm-up"
    assert [texts[start] for start in range(3, len(texts), 3)] == [(names[0], 0), (names[1], 10), (names[2], 20)]
    assert [run.counts.num_emitted for run in runs["k=2"]] == [0, 10, 20]


def test_repeats_count_with_the_medians_of_their_seconds_and_stored_generations_are_whole(tmp_path):
    later = Clocked(counts=Counts(num_emitted=2), lengths=(0, 1), whole_s=1.0, first_token_s=0.0, drafting_s=0.25)
    one = replace(later, counts=Counts(num_emitted=3), first_token_s=0.5, later=later)
    runs = [replace(one, whole_s=s, later=replace(later, drafting_s=s)) for s in (2.0, 90.0, 3.0)]
    median = median_of(runs)
    assert (median.whole_s, median.later.drafting_s, median.repeats) == (3.0, 3.0, 3)
    store = StoredRuns(KeyedStore(tmp_path / "clock.jsonl", remedy=""), "run")
    store.keep("prompt", {"arm": median})
    assert store.load(repeats=3) == {"prompt": {"arm": median}}


def test_a_generation_of_the_loop_has_its_counts_its_draft_lengths_and_its_seconds(pair):
    loop = Loop(pair=pair, sampling=Sampling(), max_draft_length=4)
    decoder = loop.decoder(FixedLength(3))
    run = clock_generation(decoder, PROMPTS[0], 12, draws=RandomSampler(3))
    generation = decoder.generate(PROMPTS[0], 12, generator=RandomSampler(3))
    assert run.counts == generations_of(decoder)((PROMPTS[0], 12, 3)).counts == generation.counts
    assert sum(run.lengths) == len(generation.rounds) > 1
    assert np.dot(run.lengths, range(len(run.lengths))) == run.counts.num_drafted
    assert 0 < run.first_token_s < run.whole_s
    assert run.drafting_s + run.verifying_s < run.whole_s, "the clock counts what lies between rounds too"
    assert run.later.counts.num_target == run.counts.num_target - 1
    assert run.later.whole_s == pytest.approx(run.whole_s - run.first_token_s)


def test_played_generations_have_the_clocks_throughput_and_percentiles_of_their_requests():
    def run(seconds, num_rounds):
        counts = Counts(num_emitted=10, num_target=num_rounds)
        lengths = (0, *[0] * num_rounds, num_rounds)
        return Clocked(counts=counts, lengths=lengths, whole_s=seconds, first_token_s=seconds / 10)

    runs = [[run(float(s), 1 + s % 2) for s in range(1, 22)]]
    played = replace(played_of(runs), prompt_of_row=np.array([*range(20), 0]))
    assert played.throughput.seconds[0, 0] == 1.0 + 21.0, "turns of one conversation count together"
    assert played.throughput.tokens[0, 0] == 20
    latency = {"request_p50_s": 11.0, "request_p95_s": 20.0, "first_token_p50_s": 1.1, "first_token_p95_s": 2.0}
    assert latency_of(played) == pytest.approx(latency)
    some = played.select([0], [2, 4])
    assert some.seconds["whole_s"].tolist() == [[3.0, 5.0]]
    both = joined([some, played])
    assert both.seconds["whole_s"].shape == (1, 23)
    assert both.lengths.sum() == some.lengths.sum() + played.lengths.sum()
    with pytest.raises(ValueError, match="has no seconds"):
        _ = replace(played, seconds=None).throughput
