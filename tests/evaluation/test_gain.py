"""Gains have paired intervals of test prompts, which hold the truth as often as they claim; tables print them."""

import json
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import bootstrap

from evaluation.gain import NUM_RESAMPLES, Gain, Throughput, gain_over
from evaluation.table import Table, crossed, flat, shown
from evaluation.times import TimeErrors, Times
from tests.cases import first_fast

NUM_DEV, NUM_TEST, NUM_SETTINGS, NUM_LENGTHS = 60, 80, 41, 9


# of 80, fewer than 69 have probability 0.06 %, 80 have 1.7 %; of 600, outside 92 to 98 % 0.07 %
@pytest.mark.parametrize(("repetitions", "least", "most"), first_fast([(80, 69, 79), (600, 552, 588)], 1))
def test_the_interval_covers_with_41_settings_chosen_on_dev(repetitions, least, most):
    """41 thresholds against 9 fixed lengths, near ties among both: dev chooses, and the true gain is that of its
    choice. A prompt's hardness is shared by all settings, and their expected seconds are the means.
    """
    thresholds = 1.0 + 0.1 * np.linspace(-1, 1, NUM_SETTINGS) ** 2
    lengths = 1.1 + 0.2 * np.linspace(-1, 1, NUM_LENGTHS) ** 2
    hits = 0
    for seed in range(repetitions):
        generator = np.random.default_rng(seed)
        hardness, chosen = [generator.gamma(4.0, 0.25, size=num) for num in (NUM_DEV, NUM_TEST)], []
        for means in (lengths, thresholds):
            noise = [generator.gamma(25.0, 1 / 25.0, size=(len(means), len(hard))) for hard in hardness]
            seconds = [means[:, None] * hard * each for hard, each in zip(hardness, noise, strict=True)]
            dev, test = (Throughput(np.full(each.shape, 10), each) for each in seconds)
            best = int(dev.tokens_per_s.argmax())
            chosen.append((means[best], test.at(best)))
        (base_s, base), (own_s, own) = chosen
        gain = gain_over(base, own)
        hits += gain.low <= base_s / own_s - 1 <= gain.high
    assert least <= hits <= most


def test_the_interval_is_that_of_scipys_bootstrap():
    generator = np.random.default_rng(9)
    base, own = (Throughput(np.full(60, 10), generator.gamma(20.0, mean / 20.0, size=60) + 1) for mean in (2.0, 1.8))

    def statistic(base_s, own_s, axis):
        return base_s.sum(axis) / own_s.sum(axis) - 1

    settings = {"paired": True, "n_resamples": NUM_RESAMPLES, "rng": np.random.default_rng(0)}
    reference = bootstrap((base.seconds, own.seconds), statistic, **settings)
    gain = gain_over(base, own)
    assert gain[1:] == pytest.approx((*reference.confidence_interval, reference.standard_error), rel=1e-9)
    for tokens, faster in (([10, 20, 30], 1.0), ([10, 20, 30], 1.25), ([7], 2.0)):  # every prompt gains alike
        seconds = np.array(tokens, dtype=float) ** 1.5
        gain = gain_over(Throughput(np.array(tokens), seconds), Throughput(np.array(tokens), seconds / faster))
        assert gain[:3] == pytest.approx([faster - 1] * 3, abs=1e-12)


def test_a_stop_is_charged_its_measured_time_however_unsure_that_is():
    """The title has the largest error, that of a stop in draft steps; beyond 10 % it asks to measure again."""
    sure = Times(0.01, (0.02, 0.03), "measured", {"entropy": 0.001}, "stops measured")
    assert "±" not in sure.title
    again = "these times are uncertain: measure them again with `acceptance-heads costs --again`"
    for error, precision in ((0.2, "times ± 3 %"), (0.5, "times ± 5 %"), (2.99, again)):
        unsure = replace(sure, errors=TimeErrors(0.02, 0.031, {"entropy": error, "token_prob": 0.1}))
        assert [unsure.stop_s(kind) for kind in ("entropy", "entropy & token_prob")] == [0.001, 0.001]
        assert unsure.title == f"t_target/t_draft = 2.00, measured; stops measured; {precision}"


GAIN = Gain(0.25, 0.1, 0.4, 0.05)


def test_a_table_prints_every_cell_under_its_heading_and_what_is_absent_as_nothing(capsys):
    table = Table("speeds", [{"policy": "a", "gain": GAIN.text}, {"policy": "b", "tokens/s": "1.0"}], "of two")
    assert table.columns == ["policy", "gain", "tokens/s"]
    assert table.cells == [["a", "+25.0% (+10.0%, +40.0%)", ""], ["b", "", "1.0"]]
    table.print()
    lines = [line for line in capsys.readouterr().out.splitlines() if "│" in line]
    cells = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    assert cells == table.cells
    assert json.loads(json.dumps(table.as_dict())) == {"title": "speeds", "rows": table.rows, "note": "of two"}
    figures = {"gain": 0.25, "gain_low": 0.1, "gain_high": 0.4}
    assert flat({"family": "a", "gain": GAIN, "tokens_per_s": 2.0}) == {"family": "a", **figures, "tokens_per_s": 2.0}
    assert Gain(0.204, 0.166, -0.004, 0.0).words == "+20 % (17, 0)"
    columns = {"policy": ("family", ""), "N": ("num", ","), "speed-up": ("speed_up", ".2f")}
    rows = shown([{"family": "a", "num": 1234, "speed_up": None}], columns)
    assert rows == [{"policy": "a", "N": "1,234", "speed-up": ""}]
    rows = crossed("policy", [("b", "batch 1", "x"), ("b", "batch 4", "y"), ("a", "batch 4", "z")])
    assert rows == [{"policy": "b", "batch 1": "x", "batch 4": "y"}, {"policy": "a", "batch 4": "z"}]
