"""What `hierarchy` compares: HSDDW's configurations, Chen's variant, and plain speculation with the draft or the micro.

Where a paper leaves a length open, there are several settings, and dev chooses; without dev prompts the first runs.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

from decode.drafters.factory import PairModels
from decode.drafters.hierarchies import InnerRounds, InterleavedDrafter, PreVerifiedDrafter, hsddw
from decode.experiment import Experiment
from decode.loop.decoder import SpeculativeDecoder
from decode.loop.drafter import Drafter, ModelDrafter
from decode.policies.base import Policy
from decode.policies.head import HeadPolicy
from decode.policies.plain import Entropy, FixedLength, SelfVerify
from evaluation.competitor import Competitor
from heads.model.head import AcceptanceHead
from lm import CachedModel
from papers.hierarchies.decoded import MICRO_ALONE, version_of

NO_DRAFT = "target alone"
PLAIN = "sd"
PRE = "sd + pre-verify"
SELF = "sd + self-verify"
BOTH = "sd + pre-verify + self-verify"
HSDDW = "HSDDW"
WINDOW = 10
"""K of HSDDW, the length of its window."""
_LENGTHS = (5, 1, 2, 3, 4, 7, 10)
_INNER = ((3, 5), *product((1, 2, 4), (3, 6, 10)))
_SCHEDULES = ((1, 3), *product((1, 2, 3), (1, 2)))


def hierarchies_of(
    experiment: Experiment, trio: PairModels, heads: Mapping[str, AcceptanceHead], *, max_rejection_prob: float = 0.5
) -> list[Competitor]:
    """All competitors, the target alone first; no model is loaded before a decoder is built. `heads` by path, one
    trained on (micro, draft) and one on (draft, target), or none, stop plain speculation and full HSDDW instead of
    entropies; `max_rejection_prob` is the threshold of both, on their calibrated probabilities.
    """
    loop = partial(trio.decoder, sampling=experiment.sampling, max_draft_length=experiment.decode.max_draft_length)
    made = partial(_competitor, loop)
    windowed = partial(_windowed, trio)
    lengths = [{"k": k} for k in _LENGTHS]
    window = [{"window": WINDOW}]
    stop = SelfVerify()
    svip = [{"max_sqrt_entropy": 0.3}]
    inner = [{"n": n, "k": k} for n, k in _INNER]
    schedules = [{"m": m, "n": n} for m, n in _SCHEDULES]
    competitors = [
        made(NO_DRAFT, [{}], lambda: ModelDrafter(trio.draft, FixedLength(0))),
        made(PLAIN, lengths, lambda k: ModelDrafter(trio.draft, FixedLength(k))),
        made(MICRO_ALONE, lengths, lambda k: ModelDrafter(trio.micro, FixedLength(k))),
        made(SELF, window, lambda window: _self_verified(trio.draft, window), stop),
        made("sd + SVIP", svip, lambda **setting: ModelDrafter(trio.draft, Entropy(**setting)), Entropy()),
        made(PRE, window, windowed(configuration="pre-verify")),
        made(BOTH, window, windowed(configuration="pre-verify + self-verify"), stop, stop),
        made(HSDDW, window, windowed(), stop, stop),
        made("HSDDW without bonus", window, windowed(bonus=False), stop, stop),
        made("pre-verified, fixed lengths", inner, lambda n, k: _pre_verified(trio, n, k)),
        made("interleaved (Chen)", schedules, lambda m, n: InterleavedDrafter(trio.micro, trio.draft, m=m, n=n)),
    ]
    if heads:
        competitors += _with_heads(made, trio, heads, max_rejection_prob)
    return competitors


def _with_heads(
    made: Callable[..., Competitor], trio: PairModels, heads: Mapping[str, AcceptanceHead], max_rejection_prob: float
) -> list[Competitor]:
    policies = tuple(
        HeadPolicy(head, max_rejection_prob=max_rejection_prob, is_calibrated=True) for head in heads.values()
    )
    _, of_draft = policies
    names = [Path(path).name for path in heads]
    version = version_of(*policies)
    plain = {"head": names[1], "max_rejection_prob": max_rejection_prob}
    full = {"window": WINDOW, "heads": " + ".join(names), "max_rejection_prob": max_rejection_prob}
    drafter = _windowed(trio, policies=policies)
    return [
        made("sd with head", [plain], lambda **_: ModelDrafter(trio.draft, of_draft), of_draft, version=version),
        made("HSDDW with heads", [full], drafter, *policies, version=version),
    ]


def _competitor(
    loop: Callable[[Drafter], SpeculativeDecoder],
    name: str,
    settings: Sequence[Mapping[str, Any]],
    drafter: Callable[..., Drafter],
    *policies: Policy,
    version: str = "",
) -> Competitor:
    """`policies`: what stops the micro and the draft, or the draft alone."""
    *below, policy = policies or (FixedLength(0),)
    micro_policy = below[0] if below else None
    return Competitor(
        name, name, policy, tuple(settings), lambda **setting: loop(drafter(**setting)), micro_policy, version
    )


def _windowed(trio: PairModels, **options: Any) -> Callable[..., Drafter]:
    return lambda window, **_: hsddw(trio.micro, trio.draft, window=window, **options)


def _self_verified(draft: CachedModel, window: int) -> Drafter:
    """Plain self-verification up to the window: a hierarchy without an inner level."""
    rounds = InnerRounds(max_rounds=0, num_alone=window)
    # a cached model has one state per generation; this second one reads nothing
    idle = CachedModel(draft.model, vocab_size=draft.vocab_size)
    return PreVerifiedDrafter(ModelDrafter(idle, FixedLength(0)), draft, SelfVerify(), rounds=rounds)


def _pre_verified(trio: PairModels, n: int, k: int) -> Drafter:
    """Inner rounds of n micro tokens until k tokens are drafted."""
    inner = ModelDrafter(trio.micro, FixedLength(n))
    return PreVerifiedDrafter(inner, trio.draft, FixedLength(k), rounds=InnerRounds(window=n))
