"""What `hierarchy` compares: HSDDW's configurations, Chen's variant, and plain speculation with the draft or the micro.

Where a paper leaves a length open, there are several settings, and dev chooses; without dev prompts the first runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from json import dumps
from pathlib import Path
from typing import Any

from data_gen.store.manifest import digest
from decode.drafters.factory import PairModels
from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.head import HeadPolicy
from decode.policies.plain import Entropy, FixedLength, SelfVerify
from evaluation.hierarchies.decoded import Configuration
from evaluation.keys import policy_key
from heads.model.head import AcceptanceHead
from lm import CachedModel

NO_DRAFT, PLAIN, MICRO_ALONE = "target alone", "sd", "sd with the micro"
PRE, SELF, BOTH, HSDDW = "sd + pre-verify", "sd + self-verify", "sd + pre-verify + self-verify", "HSDDW"
WINDOW = 10
"""K of HSDDW, the length of its window."""
_UP_TO = f"K<={WINDOW}"
_LENGTHS = (5, 1, 2, 3, 4, 7, 10)
_INNER = ((3, 5), *product((1, 2, 4), (3, 6, 10)))
_SCHEDULES = ((1, 3), *product((1, 2, 3), (1, 2)))


def version_of(*policies: Policy) -> str:
    """A digest of policies: their heads may be retrained, and their classes edited."""
    return digest(dumps(list(map(policy_key, policies)), sort_keys=True))[:8]


def configurations_of(trio: PairModels) -> list[Configuration]:
    """All configurations, the target alone first; no model is loaded before a drafter is built."""
    kind = SelfVerify().stop_kind  # Entropy's too
    on_draft, on_both = {"draft": kind}, {"micro": kind, "draft": kind}

    def windowed(name: str, setting: str = _UP_TO, *, stops: Mapping[str, str] = on_both, **options: Any) -> None:
        drafter = lambda: hsddw(trio.micro, trio.draft, window=WINDOW, **options)  # noqa: E731
        made.append(Configuration(name, setting, drafter, 3, stops=stops))

    def add(name: str, num_levels: int, settings: Mapping[str, Callable[[], Drafter]], **options: Any) -> None:
        made.extend(Configuration(name, label, build, num_levels, **options) for label, build in settings.items())

    made: list[Configuration] = []
    add(NO_DRAFT, 1, {"": _plain(trio, "draft", FixedLength(0))})
    add(PLAIN, 2, {f"K={k}": _plain(trio, "draft", FixedLength(k)) for k in _LENGTHS})
    add(MICRO_ALONE, 2, {f"K={k}": _plain(trio, "micro", FixedLength(k)) for k in _LENGTHS}, is_micro=True)
    add(SELF, 2, {_UP_TO: lambda: _self_verified(trio.draft)}, stops=on_draft)
    add("sd + SVIP", 2, {"h=0.3": _plain(trio, "draft", Entropy())}, stops=on_draft)
    windowed(PRE, f"K={WINDOW}", stops={}, configuration="pre-verify")
    windowed(BOTH, configuration="pre-verify + self-verify")
    windowed(HSDDW)
    windowed("HSDDW without bonus", bonus=False)
    add("pre-verified, fixed lengths", 3, {f"n={n} K={k}": partial(_pre_verified, trio, n, k) for n, k in _INNER})
    add("interleaved (Chen)", 3, {f"m={m} n={n}": partial(_interleaved, trio, m, n) for m, n in _SCHEDULES})
    return made


def with_heads(
    trio: PairModels, heads: Sequence[AcceptanceHead], paths: Sequence[str], *, max_rejection_prob: float
) -> list[Configuration]:
    """Trained heads instead of entropies: in plain speculation and in full HSDDW.

    Args:
        trio: the three models.
        heads: one trained on (micro, draft), one on (draft, target).
        paths: the directory of each head, in the same order.
        max_rejection_prob: the threshold of both heads, on their calibrated probabilities.
    """
    of_micro, of_draft = (HeadPolicy(head, max_rejection_prob=max_rejection_prob, is_calibrated=True) for head in heads)
    labels, version = [f"{Path(path).name} r<={max_rejection_prob:g}" for path in paths], version_of(of_micro, of_draft)
    full = lambda: hsddw(trio.micro, trio.draft, window=WINDOW, policies=(of_micro, of_draft))  # noqa: E731
    stops = {"micro": of_micro.stop_kind, "draft": of_draft.stop_kind}
    plain = {"draft": of_draft.stop_kind}
    return [
        Configuration("sd with head", labels[1], _plain(trio, "draft", of_draft), 2, version, stops=plain),
        Configuration("HSDDW with heads", " + ".join(labels), full, 3, version, stops=stops),
    ]


def _plain(trio: PairModels, name: str, policy: Policy) -> Callable[[], Drafter]:
    return lambda: ModelDrafter(getattr(trio, name), policy)


def _self_verified(draft: CachedModel) -> Drafter:
    """Plain self-verification up to the window: a hierarchy without an inner level."""
    rounds = InnerRounds(max_rounds=0, num_alone=WINDOW)
    # a cached model has one state per generation; this second one reads nothing
    idle = CachedModel(draft.model, vocab_size=draft.vocab_size)
    return PreVerifiedDrafter(ModelDrafter(idle, FixedLength(0)), draft, SelfVerify(), rounds=rounds)


def _pre_verified(trio: PairModels, n: int, k: int) -> Drafter:
    """Inner rounds of n micro tokens until k tokens are drafted."""
    inner = ModelDrafter(trio.micro, FixedLength(n))
    return PreVerifiedDrafter(inner, trio.draft, FixedLength(k), rounds=InnerRounds(window=n))


def _interleaved(trio: PairModels, m: int, n: int) -> Drafter:
    return InterleavedDrafter(trio.micro, trio.draft, m=m, n=n)
