"""Intervals of predictions: prompts, the choice on dev and the times are drawn anew together, for all competitors
alike.
"""

import numpy as np
import pytest

from evaluation.intervals import CERTAIN, Resamples, Splits, TimeErrors, Work, gain_of

NUM = 60


def work(drafting: np.ndarray, *, stopping: float = 0.0, kind: str = "") -> Work:
    """Settings whose seconds of drafting are given; one second of verification and ten tokens a prompt."""
    shape = drafting.shape
    return Work(np.full(shape, 10), drafting, stopping * drafting, np.ones(shape), kind)


def noisy(mean: float, seed: int, num_settings: int = 1) -> np.ndarray:
    return np.random.default_rng(seed).gamma(20.0, mean / 20.0, size=(num_settings, NUM))


def test_without_choice_and_errors_it_is_the_bootstrap_over_prompts():
    base, own = noisy(2.0, 1), noisy(1.8, 2)
    resamples = Resamples(NUM, NUM, CERTAIN, num=4000)
    reached = [resamples.throughput([Splits(work(each), work(each))]) for each in (base, own)]
    gains = reached[1] / reached[0] - 1
    ratios = []
    generator = np.random.default_rng(9)
    for _ in range(4000):
        rows = generator.integers(NUM, size=NUM)
        ratios.append((base[0, rows] + 1).sum() / (own[0, rows] + 1).sum() - 1)
    assert np.percentile(gains, [2.5, 50, 97.5]) == pytest.approx(np.percentile(ratios, [2.5, 50, 97.5]), abs=0.006)


def test_every_resample_chooses_on_its_own_dev_prompts():
    dev, test = noisy(2.0, 3, num_settings=8), noisy(2.0, 4, num_settings=8)
    test[0] *= 0.5  # one setting is far better on test, and no better on dev
    reached = Resamples(NUM, NUM, CERTAIN).throughput([Splits(work(dev), work(test))])
    fixed = [Resamples(NUM, NUM, CERTAIN).throughput([Splits(work(dev[[s]]), work(test[[s]]))]) for s in range(8)]
    chosen = np.array([next(s for s in range(8) if np.isclose(fixed[s][b], each)) for b, each in enumerate(reached)])
    assert len(set(chosen.tolist())) > 2, "near ties on dev fall either way"
    assert np.allclose(reached, np.choose(chosen, fixed))


def test_a_family_of_several_policies_is_the_best_of_them_on_dev():
    slow, fast = (Splits(work(noisy(mean, 5)), work(noisy(mean, 6))) for mean in (4.0, 1.0))
    resamples = Resamples(NUM, NUM, CERTAIN)
    assert np.array_equal(resamples.throughput([slow, fast]), resamples.throughput([fast]))


def test_an_unsure_time_widens_what_depends_on_it_and_nothing_else():
    drafting = noisy(3.0, 7)
    plain, looking = (
        Splits(*[work(drafting, stopping=share, kind=kind)] * 2) for share, kind in ((0.0, ""), (0.3, "entropy"))
    )
    spread = {}
    for name, errors in {
        "sure": CERTAIN,
        "stop": TimeErrors(stopping={"entropy": 0.5}),
        "draft": TimeErrors(drafting=0.2),
    }.items():
        resamples = Resamples(NUM, NUM, errors)
        base, own = resamples.throughput([plain]), resamples.throughput([looking])
        spread[name] = gain_of(0.0, base, own).standard_error, base.std()
    assert spread["stop"][0] > 3 * spread["sure"][0]
    assert spread["stop"][1] == spread["sure"][1]
    assert spread["draft"][1] > 1.5 * spread["sure"][1]


@pytest.mark.slow
def test_the_interval_holds_the_truth_as_often_as_it_says():
    """Two families of one setting each, true gain 10 %: of 300 intervals at 95 %, fewer than 273 or more than 297 has
    probability 0.2 %.
    """
    hits = 0
    for seed in range(300):
        generator = np.random.default_rng(seed)
        base = generator.gamma(9.0, size=(1, NUM)) + 1
        own = base / 1.1 * generator.normal(1.0, 0.05, size=(1, NUM))
        competitors = [Splits(*[Work(np.full((1, NUM), 10), each, 0 * each, 0 * each, "")] * 2) for each in (base, own)]
        resamples = Resamples(NUM, NUM, CERTAIN, num=800, seed=seed)
        gain = gain_of(0.1, *(resamples.throughput([one]) for one in competitors))
        low, high = np.percentile(
            resamples.throughput([competitors[1]]) / resamples.throughput([competitors[0]]) - 1, [2.5, 97.5]
        )
        assert gain.low <= low <= high <= gain.high
        hits += low <= 0.1 <= high
    assert 273 <= hits <= 297
