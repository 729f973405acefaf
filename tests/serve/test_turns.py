"""The clock of vLLM reports gains with the level of their intervals."""

import json

import pytest

from benchmarks.serve.clock import ALONE, ARMS, cell


@pytest.mark.parametrize("num_turns", [1, 3])
def test_a_cell_has_the_gain_of_every_arm_over_the_best_fixed_length(num_turns):
    def turns(seconds):
        shared = {"seconds": 1.0, "answers": [{"rounds": [[4, 2]]}]}
        return [{"cpu_seconds": seconds * (1 + 0.1 * turn), **shared} for turn in range(num_turns)]

    seconds = dict.fromkeys((ALONE, *ARMS), 2.0) | {"fixed length 4": 1.0, "auto": 0.8}
    report = cell(1, {(1, arm): turns(of_arm) for arm, of_arm in seconds.items()})
    assert (report["best_fixed"], report["level"]) == ("fixed length 4", 0.95)
    gain = report["arms"]["auto"]["over_best_fixed"]
    assert gain["value"] == pytest.approx(0.25)
    assert gain["low"] == (None if num_turns == 1 else pytest.approx(0.25)), "every turn gains alike"
    assert json.loads(json.dumps(report, allow_nan=False)) == report
