"""Batches of 7 with real random numbers write with the target's law.

A lossless batch fails one of these tests with a probability of `FALSE_ALARM` per p-value and seed; seeds are fixed.
"""

from collections import Counter, defaultdict

import numpy as np
import pytest
from scipy.stats import kstest

from lm import RandomSampler
from lm.draws import seed_of
from tests.decode.mutants import MUTANTS
from tests.evaluation.batches import sampled_laws
from tests.evaluation.batches.sampled_laws import FALSE_ALARM, LawCase, cases, p_value

NUM = 420
CASES = ("toys batch_rule plain", "toys learning_rule cold", "llamas batch_rule")


def case_of(name: str) -> LawCase:
    return next(case for case in cases() if case.name == name)


@pytest.mark.parametrize("name", CASES)
def test_a_batch_of_7_writes_with_the_targets_law_and_neighbours_are_independent(name):
    case = case_of(name)
    answers = case.answers(NUM, 1)
    assert case.law_p(answers) > FALSE_ALARM
    assert case.neighbours_p(answers) > FALSE_ALARM


@pytest.mark.parametrize("mutant", ["residual_sign", "accept_by_target_prob"])
def test_a_batch_with_another_law_would_not_pass(mutant, monkeypatch):
    monkeypatch.setattr(*MUTANTS[mutant])
    case = case_of("toys fixed_length plain")
    assert case.law_p(case.answers(NUM, 1)) < FALSE_ALARM


def test_neighbours_that_share_their_draws_would_not_pass(monkeypatch):
    case = case_of("toys batch_rule plain")
    monkeypatch.setattr(sampled_laws, "RandomSampler", lambda seed: RandomSampler(seeds[seed]))
    source = 1
    seeds = {seed_of(source, place): place // 2 for place in range(NUM)}
    answers = case.answers(NUM, source)
    assert case.law_p(answers) > FALSE_ALARM, "each alone has the law"
    assert case.neighbours_p(answers) < FALSE_ALARM


@pytest.mark.slow
def test_p_values_of_cases_that_share_a_seed_lie_together():
    """So the median of many of them strays as far as that of a few, and one far from 0.5 is no fault of the batch."""
    names = ("toys never_draft", "toys fixed_length", "toys heuristic", "toys self_verify", "toys ada_edl")
    few = [case for case in cases() if case.name.startswith(names) and case.name.endswith(("plain", "cold"))]
    together = [[case.law_p(case.answers(42, seed)) for case in few] for seed in range(8)]
    apart = [
        [case.law_p(case.answers(42, seed * len(few) + place)) for place, case in enumerate(few)] for seed in range(8)
    ]
    pairs = np.triu_indices(len(few), 1)
    shared, separate = (float(np.corrcoef(np.array(p).T)[pairs].mean()) for p in (together, apart))
    assert shared > 0.2, "of independent ones the mean of 45 correlations over 8 seeds has a standard deviation of 0.06"
    assert abs(separate) < 0.2


@pytest.mark.slow
def test_p_values_of_all_cases_are_uniform_alone_between_neighbours_and_pooled():
    """So are those of answers that numpy draws from the exact law: the chi-square approximation is good enough."""
    every, num_samples, num = list(cases()), 2, 280
    arms = defaultdict[str, list[float]](list)
    for case in every:
        samples = [case.answers(num, seed_of(0, "law", number, case.name)) for number in range(num_samples)]
        arms["law"] += [case.law_p(answers) for answers in samples]
        arms["neighbours"] += [case.neighbours_p(answers) for answers in samples]
        arms["pooled"].append(case.law_p([answer for answers in samples for answer in answers]))
        arms["control"].append(case.law_p(case.drawn(num, seed_of(0, "control", case.name))))
    assert len(every) > 80
    found = {name: float(kstest(values, "uniform").pvalue) for name, values in arms.items()}
    assert min(found.values()) > FALSE_ALARM, found


def test_outcomes_that_are_rare_are_pooled_before_any_is_seen_and_impossible_ones_are_refused():
    law = {(0,): 0.5, (1,): 0.46, (2,): 0.03, (3,): 0.01}
    # of 100 the last two are expected under 5 times each, and 4 times together: with the rarest of the others they are
    # one cell
    assert p_value([(Counter({(0,): 50, (1,): 20, (2,): 30}), law)]) == 1.0
    assert p_value([(Counter({(0,): 50, (4,): 50}), law)]) == 0.0
