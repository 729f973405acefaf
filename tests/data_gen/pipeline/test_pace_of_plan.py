"""How long data takes, from two small runs."""

import json
from dataclasses import replace
from types import SimpleNamespace

import pytest

from data_gen.pipeline import plan as planning
from data_gen.pipeline.pace import Effort, Pace


def test_steps_are_those_of_continuous_batches():
    effort = Effort.of([100, 20], longest=50, mean=30, batch_size=64)
    assert effort == Effort(2 * 50 + 17, 120 * 30)  # 36 rows join: 36 * 30 / 64 = 16.9 steps
    assert Effort.of([100], longest=50, mean=30, batch_size=64, is_decoded=False) == Effort(0, 3000)


def test_a_pace_is_found_in_runs_of_unlike_shapes():
    efforts = [Effort(40, 160), Effort(64, 1600)]
    pace = Pace.of(efforts, [40 * 0.01 + 160 * 0.002, 64 * 0.01 + 1600 * 0.002])
    assert pace == pytest.approx((0.01, 0.002))
    assert pace.seconds(Effort(1000, 30000)) == pytest.approx(70)


def test_no_part_of_a_pace_is_below_zero_and_what_has_no_steps_is_paid_by_tokens():
    assert Pace.of([Effort(40, 160), Effort(64, 1600)], [1.0, 1.0]).token_s == 0
    assert Pace.of([Effort(0, 160), Effort(0, 1600)], [1.6, 16.0]) == pytest.approx((0.0, 0.01))


def test_a_plan_reckons_the_time_of_full_batches_not_of_the_samples(toy_config, monkeypatch):
    """A machine whose batches take 10 ms a step whatever their size: 16 rows of one batch take hardly longer than 4."""
    clock = SimpleNamespace(now_s=0.0)
    made = planning.Worker.make

    def make(worker, spec, progress):
        made(worker, spec, progress)
        responses = planning.read_rows(
            planning.rows_path(worker.data.dir, spec.split, spec.index), ["response_ids"]
        ).to_pydict()["response_ids"]
        clock.now_s += 0.01 * max(map(len, responses))

    monkeypatch.setattr(planning.Worker, "make", make)
    monkeypatch.setattr(planning.time, "perf_counter", lambda: clock.now_s)
    data = replace(toy_config.data, batch_size=16, rows_per_shard=64)
    totals = planning.plan(replace(toy_config, data=data), sample=16)
    assert totals["time_s"] == pytest.approx(0.01 * totals["target_decode_forwards"], rel=0.35), json.dumps(totals)
