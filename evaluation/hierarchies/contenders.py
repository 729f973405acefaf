"""What `evaluation hierarchy` compares: HSDDW's configurations, Chen's variant, and plain speculation with the draft or with the micro.

A contender whose paper leaves a length open has several settings; `evaluation hierarchy` chooses among them on dev.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from hashlib import sha256
from itertools import product
from typing import Any

from safetensors.torch import save

from decode.drafters.hierarchies.hsddw import hsddw
from decode.drafters.hierarchies.interleaved import InterleavedDrafter
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.drafters.hierarchies.trio import Trio
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.entropy import Entropy, SelfVerify
from decode.policies.length import FixedLength
from heads.model.head import AcceptanceHead
from lm import CachedModel

WINDOW = 10
"""K of HSDDW."""
_UP_TO = f"K<={WINDOW}"
_LENGTHS = (5, 1, 2, 3, 4, 7, 10)
_INNER = ((3, 5), *product((1, 2, 4), (3, 6, 10)))
_SCHEDULES = ((1, 3), *product((1, 2, 3), (1, 2)))


@dataclass(frozen=True)
class Setting:
    """One way to run a contender."""

    label: str
    build: Callable[[], Drafter]
    version: str = ""
    """Identifies what the label does not say, such as a head's weights."""
    target: Callable[[], CachedModel] | None = None
    """What verifies; None: the trio's target."""

    @property
    def key(self) -> str:
        """What stored generations are filed under."""
        return f"{self.label} {self.version}".strip()


@dataclass(frozen=True)
class Contender:
    """One row of the tables."""

    name: str
    num_levels: int
    """Models in it: 1 is the target alone."""
    settings: tuple[Setting, ...]
    """To choose from on dev; the first stands where there is no dev."""


@dataclass(frozen=True)
class LevelPolicies:
    """Trained heads in place of entropies: of full HSDDW, and, so that two and three levels are compared alike, of plain speculation."""

    micro: Policy
    draft: Policy
    labels: tuple[str, str]
    version: str


def version_of(heads: Iterable[AcceptanceHead]) -> str:
    """Of a setting with these heads, whose paths may hold other weights tomorrow; empty for none."""
    weights = b"".join(save(dict(head.state_dict())) for head in heads)
    return sha256(weights).hexdigest()[:8] if weights else ""


def contenders_of(trio: Trio, policies: LevelPolicies | None = None) -> list[Contender]:
    """All contenders, the target alone first; no model is loaded before a setting is built."""

    def alone(name: str, policy: Policy) -> Callable[[], Drafter]:
        return lambda: ModelDrafter(getattr(trio, name), policy)

    def full(**options: Any) -> Callable[[], Drafter]:
        return lambda: hsddw(trio.micro, trio.draft, window=WINDOW, **options)

    def interleaved(m: int, n: int) -> Callable[[], Drafter]:
        return lambda: InterleavedDrafter(trio.micro, trio.draft, m=m, n=n)

    contenders = [
        _contender("target alone", 1, ("", alone("draft", FixedLength(0)))),
        _contender("sd", 2, *((f"K={k}", alone("draft", FixedLength(k))) for k in _LENGTHS)),
        _contender("sd with the micro", 2, *((f"K={k}", alone("micro", FixedLength(k))) for k in _LENGTHS)),
        _contender("sd + self-verify", 2, (_UP_TO, lambda: _self_verified(trio.draft))),
        _contender("sd + SVIP", 2, ("h=0.3", alone("draft", Entropy()))),
        _contender("sd + pre-verify", 3, (f"K={WINDOW}", full(configuration="pre-verify"))),
        _contender("sd + pre-verify + self-verify", 3, (_UP_TO, full(configuration="pre-verify + self-verify"))),
        _contender("HSDDW", 3, (_UP_TO, full())),
        _contender("HSDDW without bonus", 3, (_UP_TO, full(bonus=False))),
        _contender("pre-verified, fixed lengths", 3, *((f"n={n} K={k}", _pre_verified(trio, n, k)) for n, k in _INNER)),
        _contender("interleaved (Chen)", 3, *((f"m={m} n={n}", interleaved(m, n)) for m, n in _SCHEDULES)),
    ]
    if policies is not None:
        build = full(policies=(policies.micro, policies.draft))
        contenders.append(Contender("sd with head", 2, (Setting(policies.labels[1], alone("draft", policies.draft), policies.version),)))
        contenders.append(Contender("HSDDW with heads", 3, (Setting(" + ".join(policies.labels), build, policies.version),)))
    return contenders


def _contender(name: str, num_levels: int, *settings: tuple[str, Callable[[], Drafter]]) -> Contender:
    return Contender(name, num_levels, tuple(Setting(label, build) for label, build in settings))


def _self_verified(draft: CachedModel) -> Drafter:
    """Plain self-verification up to the window: a hierarchy without an inner level."""
    rounds = InnerRounds(max_rounds=0, num_alone=WINDOW)
    return PreVerifiedDrafter(ModelDrafter(draft, FixedLength(0)), draft, SelfVerify(), rounds=rounds)


def _pre_verified(trio: Trio, n: int, k: int) -> Callable[[], Drafter]:
    """Inner rounds of n micro tokens until k tokens are drafted."""
    return lambda: PreVerifiedDrafter(ModelDrafter(trio.micro, FixedLength(n)), trio.draft, FixedLength(k), rounds=InnerRounds(window=n))
