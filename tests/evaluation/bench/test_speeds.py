"""Times as wished: layers are found on a line, and a slow pair costs what the pair costs plus the difference of its
bare forwards.
"""

from dataclasses import replace

import pytest

from configs.schema import Config, ModelSource, PairConfig
from evaluation.bench.speeds import Stopwatch, layers_for, speed_from
from evaluation.costs.model import CostModel

NATURAL = CostModel(0.002, (0.010, 0.012, 0.013), "measured")


class Clock(Stopwatch):
    """Forwards of 1 ms (draft) and 8 ms (target), a layer of 0.5 ms, and 0.25 ms per further token and 100 layers."""

    def forwards_s(self, source, extra_layers, lengths=(0,)):
        base = 0.001 if source.path == "d" else 0.008
        return [base + 0.0005 * extra_layers + 0.0000025 * length * extra_layers for length in lengths]


def pair(**layers):
    return PairConfig(target=ModelSource(path="t"), draft=ModelSource(path="d", **layers))


@pytest.fixture
def watch():
    return Clock(models=pair(), vocab_size=10, prompt=[1, 2])


def test_layers_are_those_of_the_line_through_two_depths():
    assert layers_for(0.010, lambda layers: 0.001 + 0.0005 * layers) == 18
    assert layers_for(0.0009, lambda layers: 0.001 + 0.0005 * layers) == 0


def test_a_line_that_bends_is_met_where_it_is_wished():
    assert layers_for(0.050, lambda layers: 0.001 + 0.0005 * layers * (0.5 if layers < 20 else 1.0)) == 98


def test_a_forward_that_does_not_become_slower_is_refused():
    with pytest.raises(ValueError, match="too busy"):
        layers_for(0.010, lambda layers: 0.001)


@pytest.mark.parametrize("ratio", [2.0, 5.0, 20.0])
def test_a_slow_pair_has_the_wished_times(watch, ratio):
    speed = watch.slowed(NATURAL, ratio=ratio, t_draft_s=0.010)
    assert speed.cost.t_draft_s == pytest.approx(0.010, abs=0.0003)
    assert speed.cost.ratio == pytest.approx(ratio, rel=0.03)
    added_s = 0.0005 * speed.target_layers + 0.0000025 * 2 * speed.target_layers
    assert speed.cost.t_target_s[2] == pytest.approx(NATURAL.t_target_s[2] + added_s, rel=1e-6)


def test_no_model_is_made_faster_than_it_is(watch):
    speed = watch.slowed(NATURAL, ratio=2.0, t_draft_s=0.0001)
    assert speed.target_layers == 0
    assert speed.cost.t_draft_s == pytest.approx(0.005, abs=0.0003)


def test_a_speed_survives_json_and_adds_to_the_layers_of_the_config(watch):
    speed = watch.slowed(NATURAL, ratio=5.0, t_draft_s=0.010)
    assert speed_from(speed.as_dict(), NATURAL) == speed
    slow = speed.of(Config(pair=pair(extra_layers=3)))
    assert slow.pair.draft == replace(pair().draft, extra_layers=3 + speed.draft_layers)
    assert slow.pair.target.extra_layers == speed.target_layers
