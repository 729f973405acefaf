"""A race is kept row by row: it goes on where it stopped, over datasets, cycles and runs, and texts may end at EOS."""

from dataclasses import replace

import pytest

from evaluation.bench.arms import Racer, Written
from evaluation.bench.plots import race_plot
from evaluation.bench.race import Race, RaceTerms
from evaluation.bench.schedules import UNASSISTED, assisted
from evaluation.bench.standings import standings_of
from evaluation.bench.transfer import MEAN, gains_over, mean_gain, transfer_sheets
from evaluation.families import ALONE
from evaluation.flag_types import RaceRules
from evaluation.gain import Gain
from evaluation.times import Times
from lm import Sampling
from store.keyed import KeyedStore
from tests.toys.small_pair import EOS, PROMPTS

TERMS = RaceTerms(
    num_prompts=3,
    num_tokens=8,
    policies=("fixed_length:k=1", "fixed_length:k=2"),
    families=(),
    constants=(),
    rules=RaceRules(cycles=2),
)


DATASETS = {"home": 0, "abroad": 1}


class Toy(Race):
    """Two fixed lengths and the target alone on a clock of its own, two datasets; no model is loaded."""

    def __init__(self, path, terms=TERMS, *, stops_after=None):
        self._terms, self.played = terms, []
        self._samplings, self._stops_after = {"greedy": Sampling(temperature=0.0)}, stops_after
        self.path = path / "bench.jsonl"
        self._store = KeyedStore(self.path, remedy="")
        self.experiment = type("Toy", (), {"datasets": DATASETS, "has_feature_draft": False, "pair": None})()

    _cost = Times.constant(0.001, 0.005)

    _named, _run_key = (), {}

    def _competing_key(self, cell):
        return {}

    def _prompts(self, dataset):
        return [[place, len(dataset)] for place in range(self._terms.num_prompts)]

    def _chosen(self, cell):
        return {}

    def _arms(self, pair, sampling, chosen):
        speeds = {ALONE: 1.0, "fixed_length": 2.0, "fixed_length k=2": 4.0}
        return {name: (Racer(name.split()[0], name), self._timed(name, speed)) for name, speed in speeds.items()}

    def _timed(self, name, speed):
        def written(prompt, seed):
            if self._stops_after is not None and len(self.played) >= self._stops_after:
                raise KeyboardInterrupt
            self.played.append((name, *prompt, seed))
            return Written(6 + prompt[0], (6 + prompt[0]) / speed)

        return written


def raced(path, *, datasets=(), run=0, terms=TERMS, stops_after=None):
    race = Toy(path, replace(terms, rules=RaceRules(cycles=2, datasets=datasets, run=run)), stops_after=stops_after)
    return race, list(race.cells(("greedy",)))


def test_a_race_that_was_stopped_goes_on_with_its_next_row_and_says_the_same(tmp_path):
    whole, cells = raced(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        raced(tmp_path / "cut", stops_after=3 + 3 * 3 + 1)  # a warm-up, three rows, and an arm of the fourth
    rest, same = raced(tmp_path / "cut")
    assert same == cells
    measured = whole.played[3:]
    assert rest.played[3:] == measured[9:], "the row that was cut runs whole, the others not again"
    assert raced(tmp_path / "cut")[0].played == []


def test_arms_rotate_and_every_row_of_a_run_has_its_own_seed(tmp_path):
    first, _ = raced(tmp_path)
    second, _ = raced(tmp_path, run=1)
    rows = [first.played[start : start + 3] for start in range(3, len(first.played), 3)]
    names = [ALONE, "fixed_length", "fixed_length k=2"]
    assert [row[0][0] for row in rows] == [*names, *names[1:], names[0]]
    assert all(len({seed for *_, seed in row}) == 1 for row in rows)
    seeds = {seed for *_, seed in first.played[3:]} | {seed for *_, seed in second.played[3:]}
    assert len(seeds) == 12


def test_cycles_of_a_prompt_are_one_sample_and_the_fastest_fixed_length_is_the_rival(tmp_path):
    _, (cell,) = raced(tmp_path)
    standings = standings_of(cell)
    assert [arm["tokens"] for arm in cell["arms"]] == [[12, 14, 16]] * 3, "two cycles each"
    assert standings[1].over["fixed_length"].value == pytest.approx(-0.5)
    assert standings[2].over["fixed_length"].value == 0
    assert standings[2].over[ALONE].value == pytest.approx(3.0)


def test_the_target_alone_is_the_faster_of_its_two_ways(tmp_path):
    _, (cell,) = raced(tmp_path)
    plain = cell["arms"][0] | {
        "family": UNASSISTED,
        "seconds": [second / 1.25 for second in cell["arms"][0]["seconds"]],
    }
    standings = standings_of(cell | {"arms": [*cell["arms"], plain]})
    assert standings[2].over[ALONE].value == pytest.approx(4 / 1.25 - 1)


def test_two_datasets_have_cells_of_their_own_and_a_mean_of_transfer_sets(tmp_path):
    race, cells = raced(tmp_path, datasets=("home", "abroad"))
    assert [cell["dataset"] for cell in cells] == ["home", "abroad"]
    assert {prompt[1] for _, *prompt, _ in race.played} == {4, 6}
    judged = [(cell, standings_of(cell)) for cell in cells]
    gains = gains_over(judged, ALONE)["fixed_length"]
    assert "greedy" in race_plot(judged).svg
    assert gains["greedy", MEAN].value == pytest.approx(3.0), "each family at its fastest arm"
    sheets = {sheet.title: sheet for sheet in transfer_sheets(judged)}
    assert list(sheets) == ["over best fixed length", "over target alone"], "no product and no schedule ran"
    assert sheets["over target alone"].column("policy") == ["best fixed length"]
    with pytest.raises(ValueError, match=r"--race\.datasets names 'moon'; decode\.datasets are home, abroad"):
        raced(tmp_path, datasets=("moon",))


def test_a_mean_of_independent_gains_is_surer_than_each():
    mean = mean_gain([Gain(0.1, 0.0, 0.2, 0.03), Gain(0.3, 0.2, 0.4, 0.04)])
    assert mean.value == pytest.approx(0.2)
    assert mean.standard_error == pytest.approx(0.025)
    assert (mean.low, mean.high) == pytest.approx((0.2 - 1.96 * 0.025, 0.2 + 1.96 * 0.025))


def test_a_changed_question_is_another_race(tmp_path):
    raced(tmp_path)
    assert raced(tmp_path, terms=replace(TERMS, num_tokens=9))[0].played


def test_texts_may_end_at_eos_and_say_how_long_they_are(pair, monkeypatch):
    monkeypatch.setattr(pair.target.generation_config, "eos_token_id", list(range(pair.vocab_size)))
    timed = assisted(pair, 8, Sampling(temperature=0.0), None, ends_at_eos=True)
    assert timed(PROMPTS[0], 0).tokens == 1
    assert assisted(pair, 8, Sampling(temperature=0.0), None)(PROMPTS[0], 0).tokens == 8
    assert EOS in pair.target.generation_config.eos_token_id
