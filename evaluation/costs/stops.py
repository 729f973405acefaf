"""What a stop costs (law 4.9): the seconds that each kind of stop adds to a draft step, inside the real loop.

Policies take turns from round to round of one generation (`Rotation`), and none of them stops before the end of its
draft, so rounds differ only by the work of the stop. A cycle is a round of each kind, and a few of the fixed length, in
a new order every time. The machine's speed changes from cycle to cycle, so each draft is compared with its own cycle:

    r = seconds per draft step / median of the cycle        t_stop = (median r of the kind - median r of the fixed
                                                                     length) * t_draft

Cycles continue for `BUDGET_S` seconds: more kinds take no longer, and are less sure, which their errors say.

On other hardware a stop is taken to cost what its size says: the head's bytes over the draft's bytes, since a step of a
large model is reading its weights; signals of the distribution are then free. `decode.stop_share` says otherwise.
"""

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from time import perf_counter
from typing import Any, cast

import numpy as np
import torch

from decode.loop.drafter import Drafter, ModelDrafter, Proposal
from decode.loop.session import Session
from decode.policies import FixedLength, HeadPolicy, Policy
from decode.policies.base import AfterDraw, BeforeDraw, Number, State
from decode.policies.registry import POLICIES, policy_of
from evaluation.costs.measure import Loop, typical
from evaluation.turns import turns_within
from heads.model.head import AcceptanceHead
from lm import CachedModel
from lm.features.dspark import DSpark

STEPS = 10
"""Tokens of a draft that is timed."""
BUDGET_S = 15.0
"""Seconds that stops are timed for; longer where `FEWEST_CYCLES` take longer."""
FEWEST_CYCLES = 6
NUM_FIXED, _FIXED = 3, ""
"""Rounds of the fixed length in a cycle, with which every kind is compared."""
_RESAMPLES = 200

Draft = tuple[str, float]
"""A timed draft: the kind of its stop, and the seconds of a draft step; of a DSpark draft, of its whole block."""
Stop = tuple[float, float]
"""(seconds that a stop adds to a draft step, their standard error)."""


class Rotation(Drafter):
    """Drafters of one draft model, or of several of the same weights, which draft in the order of `waiting`.

    They share the prompt of one generation, and each waits until it has made a whole draft. Before a draft is timed,
    its model reads all but the newest token, so that every draft feeds one token first, whichever came before.
    """

    def __init__(self, drafters: Mapping[str, ModelDrafter], *, length: int) -> None:
        """Args:
        drafters: kind of stop -> drafter.
        length: tokens of a whole draft, which alone is timed; where a text ends sooner, the last drafter continues.
        """
        self._drafters, self._length = drafters, length
        self._drafter = next(iter(drafters.values()))
        self.waiting: list[str] = []
        """Kinds that are not timed yet; never empty while a generation runs."""
        self.drafts: list[Draft] = []
        """Timed drafts, in their order."""

    def start(self, session: Session) -> None:
        # drafters of one model would refuse each other, so each takes its model in a session that never opens
        apart = Session(session.sampling, session.eos_ids, session.draws)
        for drafter in self._drafters.values():
            drafter.start(apart)
        for model in {id(drafter.model): drafter.model for drafter in self._drafters.values()}.values():
            session.take(model, ModelDrafter.role)

    def propose(self, committed: list[int], max_tokens: int) -> Proposal:
        if max_tokens < self._length:
            return self._drafter.propose(committed, max_tokens)
        self._drafter = self._drafters[self.waiting[0]]
        model = self._drafter.model
        if isinstance(model, CachedModel) and (pending := committed[len(model) : -1]):
            model.feed(pending)
        started_s = perf_counter()
        proposal = self._drafter.propose(committed, max_tokens)
        seconds = perf_counter() - started_s
        # a feature draft proposes nothing before the target has read the prompt
        if len(proposal.tokens) == self._length:
            self.drafts.append((self.waiting.pop(0), seconds / proposal.num_draft_forwards))
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self._drafter.conclude(committed, num_accepted)

    def roll_back(self, length: int) -> None:
        self._drafter.roll_back(length)


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
    registered = (policy_of(name, {}) for name in POLICIES if name != "head")
    policies = [*registered, *(HeadPolicy(head) for head in heads), *others]
    return {policy.stop_kind: policy for policy in reversed(policies) if policy.stop_kind}


def time_stops(loop: Loop, policies: Mapping[str, Policy]) -> dict[str, Stop]:
    """Time the stop of each of these policies.

    Args:
        loop: what is timed, on its prompts.
        policies: one policy for each kind of stop, by its kind.

    Raises:
        ValueError: a loop that drafts nothing.
    """
    if not policies:
        return {}
    length = drafted_length(loop)
    every = {_FIXED: FixedLength(length), **{kind: unstopping(policy) for kind, policy in policies.items()}}
    drafters = {kind: ModelDrafter(loop.models.draft_for(policy), policy) for kind, policy in every.items()}
    rotation, order = Rotation(drafters, length=length), np.random.default_rng(0)
    decoder = loop.models.decoder(rotation, sampling=loop.sampling, max_draft_length=length, eos_ids=loop.eos_ids)
    generator = torch.Generator().manual_seed(0)
    rounds = (
        round_
        for prompt in itertools.cycle(loop.prompts)
        for round_ in decoder.stream(prompt, loop.max_new_tokens, generator=generator)
    )

    def next_cycle() -> list[Draft]:
        # in a new random order each time, so that none always follows the same one
        rotation.waiting, rotation.drafts = order.permutation([*policies, *[_FIXED] * NUM_FIXED]).tolist(), []
        while rotation.waiting:
            next(rounds)
        return rotation.drafts

    next_cycle()  # a warm-up
    desc = f"costs: stops of {len(policies)} kinds"
    cycles = [next_cycle() for _ in turns_within(BUDGET_S, FEWEST_CYCLES, desc=desc, unit="cycles")]
    return stops_of(cycles, list(policies))


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


def stops_of(cycles: Sequence[Sequence[Draft]], kinds: Sequence[str]) -> dict[str, Stop]:
    """The stops in these cycles; errors by resamples of cycles, the same for all kinds."""
    levels_s = [median(step_s for _, step_s in cycle) for cycle in cycles]
    drawn = np.random.default_rng(0).integers(len(cycles), size=(_RESAMPLES, len(cycles)))
    samples = np.vstack([np.arange(len(cycles)), drawn])
    medians = {}
    for kind in (_FIXED, *kinds):
        timed = zip(cycles, levels_s, strict=True)
        steps = np.array([[step_s / level_s for name, step_s in cycle if name == kind] for cycle, level_s in timed])
        medians[kind] = np.median(steps[samples], axis=(1, 2))
    fixed, unit_s = medians.pop(_FIXED), typical(levels_s)  # as t_draft is: of the machine at its best
    added_s = {kind: unit_s * (steps - fixed) for kind, steps in medians.items()}
    return {kind: (max(0.0, float(seconds[0])), float(seconds[1:].std())) for kind, seconds in added_s.items()}


def sizes(policies: Mapping[str, Policy], num_draft_weights: int) -> dict[str, float]:
    """Bytes of each policy's heads over those of the draft, both in one precision; 0 where there is no head."""
    return {
        kind: sum(weight.numel() for head in policy.heads for weight in head.parameters()) / num_draft_weights
        for kind, policy in policies.items()
    }
