"""What `decode hierarchy` compares: HSDDW's configurations, Chen's variant, and plain speculation with the draft or with the micro.

An arm whose paper leaves a length open has several settings; `decode hierarchy` chooses among them on dev.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

from decode.drafter import Drafter, ModelDrafter
from decode.hsddw import hsddw
from decode.interleaved import InterleavedDrafter
from decode.policies.base import Policy
from decode.policies.entropy import Entropy, SelfVerify
from decode.policies.length import FixedLength
from decode.pre_verified import InnerRounds, PreVerifiedDrafter
from lm import CachedModel

WINDOW = 10
"""K of HSDDW."""
_UP_TO = f"K<={WINDOW}"
_LENGTHS = (5, 1, 2, 3, 4, 7, 10)
_INNER = ((3, 5), *product((1, 2, 4), (3, 6, 10)))
_SCHEDULES = ((1, 3), *product((1, 2, 3), (1, 2)))


@dataclass(frozen=True)
class Setting:
    """One way to run an arm."""

    label: str
    build: Callable[[], Drafter]


@dataclass(frozen=True)
class Arm:
    """One row of the tables."""

    name: str
    num_levels: int
    """Models in it: 1 is the target alone."""
    settings: tuple[Setting, ...]
    """To choose from on dev; the first stands where there is no dev."""


def arms_of(micro: CachedModel, draft: CachedModel, policies: tuple[Policy, Policy] | None = None) -> list[Arm]:
    """All arms, the target alone first.

    Args:
        micro: shared by the arms, which run one after another; keeps hidden states if a policy's head reads them.
        draft: the same.
        policies: (micro's, draft's) of a further arm, full HSDDW with trained heads in place of entropies.
    """
    full = partial(hsddw, micro, draft, window=WINDOW)
    return [
        _arm("target alone", 1, ("", _alone(draft, FixedLength(0)))),
        _arm("sd", 2, *((f"K={k}", _alone(draft, FixedLength(k))) for k in _LENGTHS)),
        _arm("sd with the micro", 2, *((f"K={k}", _alone(micro, FixedLength(k))) for k in _LENGTHS)),
        _arm("sd + self-verify", 2, (_UP_TO, _alone(draft, SelfVerify(), WINDOW))),
        _arm("sd + SVIP", 2, ("h=0.3", _alone(draft, Entropy()))),
        _arm("sd + pre-verify", 3, (f"K={WINDOW}", partial(full, configuration="pre-verify"))),
        _arm("sd + pre-verify + self-verify", 3, (_UP_TO, partial(full, configuration="pre-verify + self-verify"))),
        _arm("HSDDW", 3, (_UP_TO, full)),
        _arm("HSDDW without bonus", 3, (_UP_TO, partial(full, bonus=False))),
        _arm("pre-verified, fixed lengths", 3, *((f"n={n} K={k}", _pre_verified(micro, draft, n, k)) for n, k in _INNER)),
        _arm("interleaved (Chen)", 3, *((f"m={m} n={n}", partial(InterleavedDrafter, micro, draft, m=m, n=n)) for m, n in _SCHEDULES)),
        *([] if policies is None else [_arm("HSDDW with heads", 3, (_UP_TO, partial(full, policies=policies)))]),
    ]


def _arm(name: str, num_levels: int, *settings: tuple[str, Callable[[], Drafter]]) -> Arm:
    return Arm(name, num_levels, tuple(Setting(label, build) for label, build in settings))


def _alone(model: CachedModel, policy: Policy, window: int | None = None) -> Callable[[], Drafter]:
    """Plain speculation; a window is an inner-round limit of a hierarchy without an inner level."""
    if window is None:
        return partial(ModelDrafter, model, policy)
    return partial(
        PreVerifiedDrafter, ModelDrafter(model, FixedLength(0)), model, policy, rounds=InnerRounds(max_rounds=0, num_alone=window)
    )


def _pre_verified(micro: CachedModel, draft: CachedModel, n: int, k: int) -> Callable[[], Drafter]:
    """Inner rounds of n micro tokens until k tokens are drafted."""
    return lambda: PreVerifiedDrafter(ModelDrafter(micro, FixedLength(n)), draft, FixedLength(k), rounds=InnerRounds(window=n))
