"""Some cases of `fuzz_settings`."""

import pytest

from tests.cases import first_fast
from tests.configs import fuzz_settings


@pytest.mark.parametrize(("num", "seed"), first_fast([(30, 7), (2000, 8)], 1))
def test_random_settings_are_kept_as_they_are_given_or_refused_by_name(num, seed, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    outcomes, failures = fuzz_settings.fuzz(num, seed, tmp_path)
    assert failures == {}
    assert min(outcomes["taken"], outcomes["refused"]) > num / 6
