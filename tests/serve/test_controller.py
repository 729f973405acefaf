"""The rule of a batch in a running engine (law 4.13): as fast as it can be, by times that it measures."""

from collections.abc import Callable, Sequence

import numpy as np
import pytest

from decode.policies import AfterDraw, FixedLength, Policy
from decode.policies.batch import BatchAuto, BatchCosts, Curve
from heads import AcceptanceHead
from serve.controller import Measured, MeasuredController
from serve.lanes import Lanes, RequestRow

EASY, HARD, SHARE = 0.98, 0.3, 0.8
MEAN = SHARE * EASY + (1 - SHARE) * HARD
LONGEST, T_DRAFT = 20, 0.01
Times = Callable[[float], float]


class Known(BatchAuto):
    """A rule that knows how likely each drafted token is to be accepted: its `token_prob` here."""

    signals = frozenset({"token_prob"})

    def score(self, learned, signals):
        return signals.token_prob


LINES = BatchCosts(Curve.line(1.0), Curve.line(1.0))
KNOWN = Known(AcceptanceHead(4, 0, "drawn"), LINES, next_mean=MEAN, index_offset=MEAN, first_index=MEAN)


def row_of(name: str, policy: Policy, verified: Sequence[int] = (), num_accepted: int = 0) -> RequestRow:
    return RequestRow(name, policy, verified, num_accepted, LONGEST, frozenset())


class Engine:
    """Rows that never end, each step of which takes the time that it is told to."""

    def __init__(self, draft: Times, target: Times) -> None:
        self.draft, self.target, self.now, self.tokens = draft, target, 0.0, 0
        self.lengths: dict[str, list[int]] = {}
        self.verified: dict[str, tuple[list[int], int]] = {}
        self.random, self.controller = np.random.default_rng(0), MeasuredController(lambda: self.now)
        self.lanes = Lanes(self.controller)

    def run(self, policies: list[Policy], num_rounds: int) -> float:
        """Tokens per second."""
        names = [f"{place} {type(policy)}" for place, policy in enumerate(policies)]
        tokens, since = self.tokens, self.now
        for _ in range(num_rounds):
            pairs, nothing = zip(names, policies, strict=True), ((), 0)
            rows = [row_of(name, policy, *self.verified.get(name, nothing)) for name, policy in pairs]
            self.verified = dict(zip(names, self.round(rows), strict=True))
        return (self.tokens - tokens) / (self.now - since)

    def round(self, rows: list[RequestRow]) -> list[tuple[list[int], int]]:
        self.lanes.begin(rows, {row.request for row in rows})
        chances = []
        self.now += self.draft(len(rows))  # the first step is paid in any case
        while self.lanes.is_going:
            chances.append(np.where(self.random.random(len(rows)) < SHARE, EASY, HARD))
            seen = [AfterDraw(len(chances) - 1, token_prob=chance) for chance in chances[-1].tolist()]
            self.lanes.step([len(chances)] * len(rows), seen)
            self.now += self.draft(len(rows)) * self.lanes.is_going
        drafts = self.lanes.drafts
        self.now += self.target(sum(map(len, drafts)) + len(rows))
        result = []
        for place, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
            is_accepted = [self.random.random() < step[place] for step in chances[: len(draft)]]
            num_accepted = [*is_accepted, False].index(False)
            self.tokens += num_accepted + 1
            self.lengths.setdefault(row.request, []).append(len(draft))
            result.append((draft, num_accepted))
        return result

    def mean_length(self, num_rounds: int) -> float:
        """Of all rows in the last rounds."""
        return float(np.mean([each[-num_rounds:] for each in self.lengths.values()]))


def steps(number: float) -> float:
    return T_DRAFT * (1 + number / 64)


def verification(token_s: float) -> Times:
    return lambda tokens: 5 * T_DRAFT + token_s * tokens


def best_fixed(num_rows: int, token_s: float) -> float:
    def rate(k: int) -> float:
        tokens = num_rows * (1 - MEAN ** (k + 1)) / (1 - MEAN)
        return tokens / (max(k, 1) * steps(num_rows) + verification(token_s)(num_rows * (k + 1)))

    return max(map(rate, range(LONGEST + 1)))


@pytest.mark.parametrize(("num_rows", "gain"), [(1, 1.12), (4, 1.01), (16, 0.98)])
@pytest.mark.parametrize("token_s", [0.0, 0.002])
def test_the_rule_is_as_fast_as_the_best_fixed_length_or_faster_with_times_that_it_measures(num_rows, token_s, gain):
    engine = Engine(steps, verification(token_s))
    engine.run([KNOWN] * num_rows, 10)
    assert engine.run([KNOWN] * num_rows, 1600 // num_rows) > gain * best_fixed(num_rows, token_s)


def test_a_rule_that_served_many_serves_one_as_if_it_had_served_no_other():
    fresh, after = Engine(steps, verification(0.0)), Engine(steps, verification(0.0))
    fresh.run([KNOWN], 200)
    after.run([KNOWN] * 16, 50)
    after.lengths.clear()
    after.run([KNOWN], 120)
    assert after.mean_length(100) == pytest.approx(fresh.mean_length(150), rel=0.2)


def test_a_draft_that_was_slow_at_first_is_tried_again():
    is_slow = True
    engine = Engine(lambda rows: steps(rows) * (8 if is_slow else 1), verification(0.0))
    engine.run([KNOWN], 60)
    assert engine.mean_length(40) < 2
    is_slow = False
    engine.run([KNOWN], 1400)
    assert engine.mean_length(100) > 4


@pytest.mark.parametrize("token_s", [0.0, 0.01])
def test_rows_of_the_rule_take_steps_that_others_pay(token_s: float):
    engine = Engine(steps, verification(token_s))
    engine.run([KNOWN, FixedLength(6)], 150)
    rule, fixed = engine.lengths.values()
    assert set(fixed) == {6}
    # where verification is free, so are the first six steps
    assert np.mean(rule[50:]) < 5 if token_s else min(rule[50:]) >= 6


def test_a_step_that_reads_a_prompt_says_nothing_of_verification():
    engine = Engine(steps, verification(0.0))
    engine.run([KNOWN], 50)
    before = engine.controller._costs.target(8)
    engine.now += 1000.0  # a long prompt
    engine.round([row_of("new", KNOWN)])
    engine.round([row_of("newer", KNOWN)])
    assert engine.controller._costs.target(8) == pytest.approx(before)


def test_a_measured_line_forgets_and_never_falls_and_one_slow_step_is_an_accident():
    measured = Measured()
    assert measured.curve is None
    for number, seconds in ((4, 3.0), (8, 3.2), (16, 3.6)) * 40:
        measured.add(number, seconds)
    assert measured.curve(32) - measured.curve(16) == pytest.approx(0.8, rel=0.2)
    for number in (4, 16) * 100:
        measured.add(number, 20.0 - number)
    assert measured.curve(4) == measured.curve(16) == pytest.approx(10.0, rel=0.05)
    steady = Measured()
    for seconds in (*[1.0] * 50, 1000.0):
        steady.add(4, seconds)
    assert steady.curve(4) < 1.1
