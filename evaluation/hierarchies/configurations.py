"""What `evaluation hierarchy` compares: HSDDW's configurations, Chen's variant, and plain speculation with the draft or
with the micro.

A competitor whose paper leaves a length open has several settings; `evaluation hierarchy` chooses among them on dev.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from json import dumps
from pathlib import Path
from typing import Any

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.drafters.hierarchies.hsddw import hsddw
from decode.drafters.hierarchies.interleaved import InterleavedDrafter
from decode.drafters.hierarchies.pre_verified import InnerRounds, PreVerifiedDrafter
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.entropy import Entropy, SelfVerify
from decode.policies.head import HeadPolicy
from decode.policies.length import FixedLength
from evaluation.hierarchies.built import Competitor, Setting
from evaluation.keys import policy_key
from heads.model.head import AcceptanceHead
from lm import CachedModel

NO_DRAFT = "target alone"
WINDOW = 10
"""K of HSDDW, the length of its window."""
_UP_TO = f"K<={WINDOW}"
_LENGTHS = (5, 1, 2, 3, 4, 7, 10)
_INNER = ((3, 5), *product((1, 2, 4), (3, 6, 10)))
_SCHEDULES = ((1, 3), *product((1, 2, 3), (1, 2)))


def version_of(*policies: Policy) -> str:
    """Version of a setting with these policies: a path may hold another head tomorrow, a module another class."""
    return digest(dumps(list(map(policy_key, policies)), sort_keys=True))[:8]


def competitors_of(trio: PairModels) -> list[Competitor]:
    """All competitors, the target alone first; no model is loaded before a setting is built."""

    alone = partial(_alone, trio)

    def full(**options: Any) -> Callable[[], Drafter]:
        return lambda: hsddw(trio.micro, trio.draft, window=WINDOW, **options)

    def interleaved(m: int, n: int) -> Callable[[], Drafter]:
        return lambda: InterleavedDrafter(trio.micro, trio.draft, m=m, n=n)

    kind = SelfVerify().stop_kind  # Entropy's too
    on_draft, on_both = {"draft": kind}, {"micro": kind, "draft": kind}
    return [
        _competitor(NO_DRAFT, 1, ("", alone("draft", FixedLength(0)))),
        _competitor("sd", 2, *((f"K={k}", alone("draft", FixedLength(k))) for k in _LENGTHS)),
        _competitor("sd with the micro", 2, *((f"K={k}", alone("micro", FixedLength(k))) for k in _LENGTHS)),
        _competitor("sd + self-verify", 2, (_UP_TO, lambda: _self_verified(trio.draft)), stops=on_draft),
        _competitor("sd + SVIP", 2, ("h=0.3", alone("draft", Entropy())), stops=on_draft),
        _competitor("sd + pre-verify", 3, (f"K={WINDOW}", full(configuration="pre-verify"))),
        _competitor(
            "sd + pre-verify + self-verify", 3, (_UP_TO, full(configuration="pre-verify + self-verify")), stops=on_both
        ),
        _competitor("HSDDW", 3, (_UP_TO, full()), stops=on_both),
        _competitor("HSDDW without bonus", 3, (_UP_TO, full(bonus=False)), stops=on_both),
        _competitor(
            "pre-verified, fixed lengths", 3, *((f"n={n} K={k}", _pre_verified(trio, n, k)) for n, k in _INNER)
        ),
        _competitor("interleaved (Chen)", 3, *((f"m={m} n={n}", interleaved(m, n)) for m, n in _SCHEDULES)),
    ]


def with_heads(
    trio: PairModels, heads: Sequence[AcceptanceHead], paths: Sequence[str], *, max_rejection_prob: float
) -> list[Competitor]:
    """Trained heads in place of entropies: in full HSDDW, and, so that two and three levels are compared alike, in
    plain speculation.

    Args:
        trio: the three models.
        heads: one trained on (micro, draft), one on (draft, target).
        paths: the directory of each head, in the same order.
        max_rejection_prob: the threshold of both heads, on their calibrated probabilities.
    """
    policies = [HeadPolicy(head, max_rejection_prob=max_rejection_prob, is_calibrated=True) for head in heads]
    labels, version = [f"{Path(path).name} r<={max_rejection_prob:g}" for path in paths], version_of(*policies)

    def full() -> Drafter:
        return hsddw(trio.micro, trio.draft, window=WINDOW, policies=(policies[0], policies[1]))

    kinds = {level: policy.stop_kind for level, policy in zip(("micro", "draft"), policies, strict=True)}
    head = Setting(labels[1], _alone(trio, "draft", policies[1]), version, stops={"draft": kinds["draft"]})
    return [
        Competitor("sd with head", 2, (head,)),
        Competitor("HSDDW with heads", 3, (Setting(" + ".join(labels), full, version, stops=kinds),)),
    ]


def _alone(trio: PairModels, name: str, policy: Policy) -> Callable[[], Drafter]:
    return lambda: ModelDrafter(getattr(trio, name), policy)


def _competitor(
    name: str, num_levels: int, *settings: tuple[str, Callable[[], Drafter]], stops: Mapping[str, str] | None = None
) -> Competitor:
    return Competitor(name, num_levels, tuple(Setting(label, build, stops=stops or {}) for label, build in settings))


def _self_verified(draft: CachedModel) -> Drafter:
    """Plain self-verification up to the window: a hierarchy without an inner level."""
    rounds = InnerRounds(max_rounds=0, num_alone=WINDOW)
    # a generation has each cached model in one place, this one reads nothing
    idle = CachedModel(draft.model, vocab_size=draft.vocab_size)
    return PreVerifiedDrafter(ModelDrafter(idle, FixedLength(0)), draft, SelfVerify(), rounds=rounds)


def _pre_verified(trio: PairModels, n: int, k: int) -> Callable[[], Drafter]:
    """Inner rounds of n micro tokens until k tokens are drafted."""
    return lambda: PreVerifiedDrafter(
        ModelDrafter(trio.micro, FixedLength(n)), trio.draft, FixedLength(k), rounds=InnerRounds(window=n)
    )
