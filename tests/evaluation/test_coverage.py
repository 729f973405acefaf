"""95 % intervals hold the true gain as often as they claim, and leads that do not exist are not called real."""

import pytest

from tests.cases import first_fast
from tests.evaluation.coverage import POPULATIONS, gains_without_a_true_gain, share_above_noise, share_covering

REPETITIONS = 4000
# very long responses of which the hardest are the longest have 92 % (docs/how-it-works.md)
NAMES = [name for name in POPULATIONS if "very long" not in name]


# the shares are 93.4 % or more: one of 4,000 below 92.5 % has probability 1 % at most; without the factor of t, 12
# prompts have 91 %
@pytest.mark.parametrize(("num_test", "name"), first_fast([(num, name) for num in (12, 30, 80) for name in NAMES], 1))
def test_the_interval_covers_with_settings_chosen_on_dev(num_test, name):
    gains = list(gains_without_a_true_gain(POPULATIONS[name](), num_test, repetitions=REPETITIONS))
    assert 0.925 <= share_covering(gains) <= 0.97
    assert share_above_noise(gains) <= 0.045


@pytest.mark.parametrize("num_test", [2, 4, 8])
def test_too_few_prompts_prove_nothing(num_test):
    gains = list(gains_without_a_true_gain(POPULATIONS[NAMES[0]](), num_test, repetitions=100))
    assert share_covering(gains) is None
    assert share_above_noise(gains) == 0
