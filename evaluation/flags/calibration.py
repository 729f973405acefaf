"""Where a head cannot go: two numbers for each place in the draft that bring llama.cpp's own confidence closest to it.

With c the engine's confidence of a token and h the head's probability that it is accepted,

    h ~ sigmoid(a_j + b_j logit(c))              at place j of the draft

a_j and b_j are fitted on dev by cross-entropy, each token weighted by the head's survival before it, which is how often
a draft comes to it, and drawn a little towards (0, 1), what the engine has. On test they are judged twice: by what is
left of the divergence from the head, and by the speed of a stop on them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float, Int
from scipy.optimize import minimize
from scipy.special import expit, xlogy

from decode.policies.engines import CalibratedTopProb
from decode.policies.learning import logit_of
from decode.policies.registry import LOGISTIC, RULES
from evaluation.contest.arms import Pick
from evaluation.contest.grids import Grid, label_of
from evaluation.flags.choice import FLAGS, Choice, Contest, arm_of, options_of
from evaluation.flags.ours import option_of
from evaluation.sheet import Sheet
from evaluation.traces.trace import Array, Trace
from heads.model.head import AcceptanceHead

_PRIOR = 20.0
"""Weight, in tokens, of (a, b) = (0, 1) at each place."""
_PLACES = 8
"""Places with numbers of their own; those behind share the last's."""
PRODUCT, PER_PLACE, HEAD = "their product, calibrated", "a p-min for each place", "the head itself"


class Seen(NamedTuple):
    """Tokens at one place of a draft, from every place of the responses where a round may start."""

    logit: Float[Array, " token"]
    """logit(c)."""
    head_prob: Float[Array, " token"]
    weight: Float[Array, " token"]


@dataclass(frozen=True, kw_only=True)
class Calibrated:
    """The numbers, and what they are worth."""

    head: str
    offsets: tuple[float, ...]
    slopes: tuple[float, ...]
    divergence: tuple[float, float]
    """KL from the head to the engine's confidence, and to the calibrated one, on test, in nats per token."""
    choices: dict[str, Choice]
    kept: float | None
    """Share of the head's gain over the flags that the better of the two stops keeps; None where the head has none."""

    @property
    def sentence(self) -> str:
        """What they keep, and what of it can be had today."""
        if self.kept is None:
            gain = "the head gains nothing over the flags here, so that there is nothing to keep"
        elif self.kept <= 0:
            gain = f"no stop on them keeps anything of what head {self.head} gains over these flags"
        else:
            gain = f"the better stop on them keeps {self.kept:.0%} of what head {self.head} gains over these flags"
        return (
            f"Calibrated at each place, llama.cpp's own confidence comes from {self.divergence[0]:.3f} to "
            f"{self.divergence[1]:.3f} nats of the head's, and {gain}. Neither is a flag: llama.cpp takes one p-min "
            "for all places. What it takes today is the line above."
        )

    def as_dict(self) -> dict[str, Any]:
        """The numbers as JSON has them."""
        speeds = {name: choice.tokens_per_s for name, choice in self.choices.items()}
        fields = ("head", "offsets", "slopes", "divergence", "kept")
        return {name: getattr(self, name) for name in fields} | {"tokens_per_s": speeds}


def calibrate(contest: Contest, best: Pick, flags: Choice) -> Calibrated:
    """The calibration towards a drawn-time head, the fastest on dev.

    Args:
        contest: the engine's, whose drafts are point masses.
        best: the head's arm at its threshold.
        flags: the engine at its best setting.
    """
    head: AcceptanceHead = best.arm.grid.policy.head  # type: ignore[attr-defined]
    fitted = [fit(seen) for seen in places_of(contest.home.dev, head)]
    offsets, slopes = (tuple(values) for values in zip(*fitted, strict=True))
    choices = {FLAGS: flags} | {
        name: _choice(contest, name, CalibratedTopProb(offsets, slopes, is_cumulative=is_cumulative))
        for name, is_cumulative in ((PRODUCT, True), (PER_PLACE, False))
    }
    choices[HEAD] = Choice(HEAD, option_of(best, contest))
    gains = {name: choice.tokens_per_s / flags.tokens_per_s - 1 for name, choice in choices.items()}
    better = max((PRODUCT, PER_PLACE), key=lambda name: choices[name].option.speeds.dev)
    on_test = list(places_of(contest.home.test, head))
    return Calibrated(
        head=best.arm.grid.name.removeprefix("head:"),
        offsets=offsets,
        slopes=slopes,
        divergence=(divergence(on_test, [(0.0, 1.0)] * len(on_test)), divergence(on_test, fitted)),
        choices=choices,
        kept=gains[better] / gains[HEAD] if gains[HEAD] > 0 else None,
    )


def _choice(contest: Contest, name: str, policy: CalibratedTopProb) -> Choice:
    lengths = RULES["llama_cpp"].values(contest.home.dev.max_draft_length)["n_max"]
    settings = tuple({"n_max": n_max, "max_rejection_prob": value} for n_max in lengths for value in LOGISTIC)
    arrays: dict[str, Any] = {key: np.array([setting[key] for setting in settings]) for key in settings[0]}
    arm = arm_of(Grid(name, name, replace(policy, **arrays), settings), contest.home)
    return contest.choice(name, options_of(arm, arm.spent(contest.times.speculating), None))


def places_of(trace: Trace, head: AcceptanceHead) -> Iterator[Seen]:
    """The tokens at each place of a draft, place by place; the last has those of all places behind it, too."""
    logit = logit_of(trace.signal("top_prob").astype(np.float64))
    head_prob = expit(head.calibrated_logit(trace.logit(head).astype(np.float64)))
    weight = np.ones(trace.num_positions)
    behind: list[Seen] = []
    for place in range(trace.max_draft_length):
        starts, at = drawn_at(trace, place)
        seen = Seen(logit[at], head_prob[at], weight[starts])
        weight[starts] *= head_prob[at]
        if place < _PLACES - 1:
            yield seen
        else:
            behind.append(seen)
    if behind:
        yield Seen(*(np.concatenate(column) for column in zip(*behind, strict=True)))


def drawn_at(trace: Trace, place: int) -> tuple[Int[Array, " token"], Int[Array, " token"]]:
    """(starts of rounds that draft so far, flat index of the token at that place of their drafts)"""
    starts = np.arange(trace.num_positions)
    ends = np.repeat(trace.offsets[1:], np.diff(trace.offsets))
    path, fork = starts + place, trace.fork
    is_on_path = path < np.minimum(fork, ends)
    lengths = np.zeros(trace.num_positions, dtype=np.int64)
    lengths[trace.is_rejected] = trace.branch_lengths
    forked = np.minimum(fork, trace.num_positions - 1)
    is_in_branch = ~is_on_path & (fork < ends) & (path - fork < lengths[forked])
    at = np.where(is_on_path, path, trace.branch[forked] + path - fork)
    is_there = (is_on_path | is_in_branch) & (place < trace.longest)
    return starts[is_there], at[is_there]


def fit(seen: Seen) -> tuple[float, float]:
    """(a, b) of the least weighted cross-entropy from the head's probabilities."""

    def loss(numbers: Float[np.ndarray, " two"]) -> float:
        offset, slope = numbers
        far = offset**2 + (slope - 1) ** 2
        return float((seen.weight * _cross_entropy(seen, offset, slope)).sum() + _PRIOR * far)

    found = minimize(loss, np.array([0.0, 1.0]), method="Nelder-Mead")
    return float(found.x[0]), max(float(found.x[1]), 1e-3)


def divergence(places: Sequence[Seen], numbers: Sequence[tuple[float, float]]) -> float:
    """Weighted mean KL from the head's probabilities to those of the numbers, in nats per token."""
    total, weight = 0.0, 0.0
    for seen, (offset, slope) in zip(places, numbers, strict=True):
        own = -xlogy(seen.head_prob, seen.head_prob) - xlogy(1 - seen.head_prob, 1 - seen.head_prob)
        total += float((seen.weight * (_cross_entropy(seen, offset, slope) - own)).sum())
        weight += float(seen.weight.sum())
    return total / weight


def _cross_entropy(seen: Seen, offset: float, slope: float) -> Float[np.ndarray, " token"]:
    logit = offset + slope * seen.logit
    return np.asarray(np.logaddexp(0.0, logit) - seen.head_prob * logit)


def calibration_sheet(calibrated: Calibrated) -> Sheet:
    """What each stop reaches, beside the flags and the head."""
    base = calibrated.choices[FLAGS]
    rows = [
        {
            "what": name,
            "setting": label_of("", choice.option.setting),
            "tokens/s": f"{choice.tokens_per_s:.1f}",
            "over these flags": "" if choice is base else choice.over(base).text,
        }
        for name, choice in calibrated.choices.items()
    ]
    pairs = "; ".join(f"{a:+.2f} {b:+.2f}" for a, b in zip(calibrated.offsets, calibrated.slopes, strict=True))
    note = f"offset and slope on the logit of the confidence, place by place, the last for all behind it: {pairs}"
    return Sheet(f"llama.cpp's confidence calibrated to head {calibrated.head}", rows, note, names=2)
