"""What a stop costs (law 4.9): the seconds that each kind of stop adds to a draft step, inside the real loop.

Policies take turns from round to round of one generation (`evaluation.costs.rotation`), and none of them stops before
the end of its draft, so rounds differ only by the work of the stop. A cycle is a round of each kind, and a few of the
fixed length, in a new order every time. The machine's speed changes from cycle to cycle, so each draft is compared with
its own cycle:

    r = seconds per draft step / median of the cycle        t_stop = (median r of the kind - median r of the fixed
                                                                     length) * t_draft

Cycles go on for `BUDGET_S` seconds: more kinds take no longer, and are less sure, which `Stop.error_s` says.

On other hardware a stop is taken to cost what its size says: the head's bytes over the draft's bytes, since a step of a
large model is reading its weights; signals of the distribution are then free. `decode.stop_share` says otherwise.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from typing import Any, NamedTuple, cast

import numpy as np
import torch

from decode.loop.drafter import ModelDrafter
from decode.policies import FixedLength, HeadPolicy, Policy
from decode.policies.base import AfterDraw, BeforeDraw, Number, State
from decode.policies.registry import POLICIES, make_policy
from decode.policies.scores import ScoringPolicy
from evaluation.costs.measure import Loop, typical
from evaluation.costs.rotation import Draft, Rotation, shuffled
from evaluation.turns import turns_within
from heads.model.head import AcceptanceHead
from lm.features.dspark import DSpark

STEPS = 10
"""Tokens of a draft that is timed."""
BUDGET_S = 15.0
"""Seconds that stops are timed for; longer where `FEWEST_CYCLES` take longer."""
FEWEST_CYCLES = 6
NUM_FIXED, _FIXED = 3, ""
"""Rounds of the fixed length in a cycle, with which every kind is compared."""
_RESAMPLES = 200


class Stop(NamedTuple):
    """Seconds that a stop adds to a draft step, with their error."""

    seconds: float
    error_s: float
    """Standard error."""


def unstopping(policy: Policy) -> Policy:
    """A policy that does all the work of another one and never stops."""
    kind: Any = type(policy)

    class Unstopping(kind):  # type: ignore[misc]
        limit = Policy.limit

        def stop_before(self, state: State, before: BeforeDraw) -> Number:
            super().stop_before(state, before)
            return False

        def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
            state, _ = super().after(state, drawn)
            return state, False

    return cast(Policy, Unstopping(**{field.name: getattr(policy, field.name) for field in fields(kind)}))


def policies_by_kind(heads: Iterable[AcceptanceHead], others: Iterable[Policy] = ()) -> dict[str, Policy]:
    """One policy of each kind of stop: the registered ones at their defaults, one head of each shape, and the
    `others`.
    """
    registered = (make_policy(name) for name in POLICIES if name != "head")
    policies = [*registered, *(HeadPolicy(head) for head in heads), *others]
    return {policy.stop_kind: policy for policy in reversed(policies) if policy.stop_kind}


def time_stops(loop: Loop, policies: Mapping[str, Policy]) -> dict[str, Stop]:
    """Time the stop of each of these policies.

    Args:
        loop: what is timed, on its prompts.
        policies: one policy for each kind of stop, by its kind.
    """
    if not policies:
        return {}
    mixtures = mixtures_of(policies)
    timed = timed_kinds(policies)
    length, cycle = drafted_length(loop), [*timed, *[_FIXED] * NUM_FIXED]
    arms = {_FIXED: FixedLength(length), **{kind: unstopping(policies[kind]) for kind in timed}}
    drafters = {kind: ModelDrafter(loop.models.draft_for(policy), policy) for kind, policy in arms.items()}
    rotation = Rotation(drafters, shuffled(cycle), length=length)
    decoder = loop.models.decoder(rotation, sampling=loop.sampling, max_draft_length=length, eos_ids=loop.eos_ids)
    generator = torch.Generator().manual_seed(0)
    rounds = (
        round_
        for prompt in itertools.cycle(loop.prompts)
        for round_ in decoder.stream(prompt, loop.max_new_tokens, generator=generator)
    )

    def next_cycle() -> list[Draft]:
        while len(rotation.drafts) < len(cycle):
            next(rounds)
        played, rotation.drafts = rotation.drafts, []
        return played

    next_cycle()  # a warm-up
    desc = f"costs: stops of {len(policies)} kinds"
    cycles = [next_cycle() for _ in turns_within(BUDGET_S, FEWEST_CYCLES, desc=desc, unit="cycles")]
    return _stops_of(cycles, mixtures)


def mixtures_of(policies: Mapping[str, Policy]) -> dict[str, dict[str, float]]:
    """Each kind of stop as a weighted mean of kinds that are timed.

    Heads that differ by the number of their blocks alone lie on a line, since all blocks are of one size: the
    shallowest and the deepest are timed. Every other kind is timed itself.

    Example: with fed-d0, fed-d1 and fed-d4, the mixture of fed-d1 is {fed-d0: 0.75, fed-d4: 0.25}.
    """
    depths: dict[str, dict[str, int]] = {}
    for kind, policy in policies.items():
        if isinstance(policy, ScoringPolicy) and len(policy.heads) == 1:
            depth = policy.heads[0].depth
            depths.setdefault(kind.removesuffix(f"-d{depth}"), {})[kind] = depth
    mixtures = {kind: {kind: 1.0} for kind in policies}
    for of_shape in depths.values():
        first, last = min(of_shape, key=of_shape.__getitem__), max(of_shape, key=of_shape.__getitem__)
        for kind in of_shape.keys() - {first, last}:
            share = (of_shape[kind] - of_shape[first]) / (of_shape[last] - of_shape[first])
            mixtures[kind] = {first: 1 - share, last: share}
    return mixtures


def timed_kinds(policies: Mapping[str, Policy]) -> list[str]:
    """The kinds of stop that are timed, of which the others are mixtures."""
    return list(dict.fromkeys(kind for mixture in mixtures_of(policies).values() for kind in mixture))


def drafted_length(loop: Loop) -> int:
    """Tokens of each draft that is timed.

    Raises:
        ValueError: the loop drafts none.
    """
    drafting = loop.pair.drafting
    of_block = drafting.block_size if isinstance(drafting, DSpark) else STEPS
    length = min(STEPS, of_block, loop.max_draft_length, loop.max_new_tokens - 1)
    if length < 1:
        raise ValueError(
            f"stops are timed on drafts, and with decode.max_draft_length {loop.max_draft_length} and "
            f"decode.max_new_tokens {loop.max_new_tokens} none has a token; raise them, or give decode.t_*_s"
        )
    return length


def _stops_of(cycles: Sequence[Sequence[Draft]], mixtures: Mapping[str, Mapping[str, float]]) -> dict[str, Stop]:
    levels_s = [median(draft.step_s for draft in cycle) for cycle in cycles]
    paces: dict[str, list[list[float]]] = {}
    for cycle, level_s in zip(cycles, levels_s, strict=True):
        of_cycle: dict[str, list[float]] = {}
        for draft in cycle:
            of_cycle.setdefault(draft.kind, []).append(draft.step_s / level_s)
        for kind, steps in of_cycle.items():
            paces.setdefault(kind, []).append(steps)
    # the cycles themselves, then resamples of them: one draw for all kinds, which share the fixed length
    drawn = np.random.default_rng(0).integers(len(cycles), size=(_RESAMPLES, len(cycles)))
    samples = [np.arange(len(cycles)), *drawn]
    medians = {kind: np.array([np.median(np.array(steps)[rows]) for rows in samples]) for kind, steps in paces.items()}
    unit_s = typical(levels_s)  # as t_draft is: of the machine at its best
    stops = {}
    for kind, mixture in mixtures.items():
        added_s = unit_s * (sum(share * medians[timed] for timed, share in mixture.items()) - medians[_FIXED])
        stops[kind] = Stop(max(0.0, float(added_s[0])), float(added_s[1:].std()))
    return stops


def sizes(policies: Mapping[str, Policy], num_draft_weights: int) -> dict[str, float]:
    """Bytes of each policy's heads over those of the draft, both in one precision; 0 where there is no head."""
    return {kind: _num_weights(policy) / num_draft_weights for kind, policy in policies.items()}


def _num_weights(policy: Policy) -> int:
    if not isinstance(policy, ScoringPolicy):
        return 0
    return sum(weight.numel() for head in policy.heads for weight in head.parameters())
