"""A race is stored row by row: it resumes where it stopped, over cycles and runs."""

import pytest

from evaluation.bench.arms import assisted
from evaluation.bench.race import measured_rows, totals_of
from evaluation.flag_types import RaceRules
from lm import Sampling
from store.json_files import KeyedStore
from tests.toys.small_pair import EOS, PROMPTS

SPEEDS = {"alone": 1.0, "k=1": 2.0, "k=2": 4.0}
NUM_ARMS, WARM_UP = len(SPEEDS), len(SPEEDS)


def raced(path, *, run=0, race="race", stops_after=None):
    """Three prompts, two cycles: (texts in the order in which they were written, rows by prompt)."""
    texts = []

    def timed(name, speed):
        def written(prompt, seed):
            if stops_after is not None and len(texts) >= stops_after:
                raise KeyboardInterrupt
            texts.append((name, prompt[0], seed))
            return 6 + prompt[0], (6 + prompt[0]) / speed

        return written

    arms = {name: timed(name, speed) for name, speed in SPEEDS.items()}
    store, rules = KeyedStore(path / "bench.jsonl", remedy=""), RaceRules(cycles=2, run=run)
    rows = measured_rows(store, race, arms, [[number] for number in range(3)], rules=rules, desc="race")
    return texts, rows


def test_a_race_that_was_stopped_resumes_with_its_next_row(tmp_path):
    whole, rows = raced(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        raced(tmp_path / "cut", stops_after=WARM_UP + 3 * NUM_ARMS + 1)  # three rows, and an arm of the fourth
    rest, same = raced(tmp_path / "cut")
    assert same == rows
    assert rest[WARM_UP:] == whole[WARM_UP + 3 * NUM_ARMS :], "the row that was cut runs whole, the others not again"
    assert raced(tmp_path / "cut") == ([], rows)
    assert raced(tmp_path / "cut", race="another")[0] == whole


def test_arms_rotate_and_every_row_of_a_run_has_its_own_seed(tmp_path):
    (first, _), (second, _) = raced(tmp_path), raced(tmp_path, race="run 1", run=1)
    rows = [texts[start : start + 3] for texts in (first, second) for start in range(WARM_UP, len(texts), 3)]
    names = list(SPEEDS)
    assert [row[0][0] for row in rows[:4]] == [*names, names[1]]
    assert all(len({seed for *_, seed in row}) == 1 for row in rows)
    assert len({seed for row in rows for *_, seed in row}) == 12


def test_cycles_of_a_prompt_are_one_sample(tmp_path):
    totals = totals_of(raced(tmp_path)[1])
    assert [of_arm["tokens"] for of_arm in totals] == [[12, 14, 16]] * 3
    assert totals[2]["seconds"] == [3.0, 3.5, 4.0]


def test_texts_may_end_at_eos_and_report_their_length(pair, monkeypatch):
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", list(range(pair.vocab_size)))
    timed = assisted(pair, 8, Sampling(temperature=0.0), None, ends_at_eos=True)
    assert timed(PROMPTS[0], 0)[0] == 1
    assert assisted(pair, 8, Sampling(temperature=0.0), None)(PROMPTS[0], 0)[0] == 8
    assert EOS in pair.target.generation_config.eos_token_id
