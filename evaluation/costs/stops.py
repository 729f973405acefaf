"""What a stop costs (law 4.9): the seconds that each kind of stop adds to a draft step, inside the real loop.

Policies take turns from round to round of one generation (`Rotation`), and none of them stops before the end of its
draft, so rounds differ only by the work of the stop. A cycle is a round of each kind, and a few of the fixed length, in
a new order every time. The machine's speed changes from cycle to cycle, so each draft is compared with its own cycle:

    r = seconds per draft step / median of the cycle        t_stop = (median r of the kind - median r of the fixed
                                                                     length) * t_draft

Cycles go on for `BUDGET_S` seconds: more kinds take no longer, and are less sure, which their errors say.

On other hardware a stop is taken to cost what its size says: the head's bytes over the draft's bytes, since a step of a
large model is reading its weights; signals of the distribution are then free. `decode.stop_share` says otherwise.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """Drafters of one draft model, or of several of the same weights, each for one round in its turn.

    They share the prompt of one generation. Before a draft is timed, its model reads all but the newest token, so that
    every draft feeds one token first, whichever came before.
    """

    def __init__(self, drafters: Mapping[str, ModelDrafter], order: Iterator[str], *, length: int) -> None:
        """Args:
        drafters: kind of stop -> drafter.
        order: kinds, without end.
        length: tokens of a timed draft; where a text ends sooner, the last drafter continues, and is not timed.
        """
        self._drafters, self._order, self._length = drafters, order, length
        self._drafter = next(iter(drafters.values()))
        self._waiting: str | None = None
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
        # a feature draft proposes nothing before the target has read the prompt: it is that kind's turn again
        kind = next(self._order) if self._waiting is None else self._waiting
        self._drafter = self._drafters[kind]
        model = self._drafter.model
        if isinstance(model, CachedModel) and (pending := committed[len(model) : -1]):
            model.feed(pending)
        started_s = perf_counter()
        proposal = self._drafter.propose(committed, max_tokens)
        seconds = perf_counter() - started_s
        is_whole = len(proposal.tokens) == self._length
        self._waiting = None if is_whole else kind
        if is_whole:
            self.drafts.append((kind, seconds / proposal.num_draft_forwards))
        return proposal

    def conclude(self, committed: list[int], num_accepted: int) -> None:
        self._drafter.conclude(committed, num_accepted)

    def roll_back(self, length: int) -> None:
        self._drafter.roll_back(length)


def shuffled(cycle: list[str]) -> Iterator[str]:
    """The names of a cycle, in a new random order each time, so that none always follows the same one."""
    generator = np.random.default_rng(0)
    while True:
        yield from generator.permutation(cycle).tolist()


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
    mixtures = mixtures_of(policies)
    timed = dict.fromkeys(kind for mixture in mixtures.values() for kind in mixture)
    length, cycle = drafted_length(loop), [*timed, *[_FIXED] * NUM_FIXED]
    every = {_FIXED: FixedLength(length), **{kind: unstopping(policies[kind]) for kind in timed}}
    drafters = {kind: ModelDrafter(loop.models.draft_for(policy), policy) for kind, policy in every.items()}
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
        if len(policy.heads) == 1:
            depth = policy.heads[0].depth
            depths.setdefault(kind.removesuffix(f"-d{depth}"), {})[kind] = depth
    mixtures = {kind: {kind: 1.0} for kind in policies}
    for of_shape in depths.values():
        first, last = min(of_shape, key=of_shape.__getitem__), max(of_shape, key=of_shape.__getitem__)
        for kind in of_shape.keys() - {first, last}:
            share = (of_shape[kind] - of_shape[first]) / (of_shape[last] - of_shape[first])
            mixtures[kind] = {first: 1 - share, last: share}
    return mixtures


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
    levels_s = [median(step_s for _, step_s in cycle) for cycle in cycles]
    relative: dict[str, list[list[float]]] = {kind: [[] for _ in cycles] for kind, _ in cycles[0]}
    for number, (cycle, level_s) in enumerate(zip(cycles, levels_s, strict=True)):
        for kind, step_s in cycle:
            relative[kind][number].append(step_s / level_s)
    # the cycles themselves, then resamples of them: one draw for all kinds, which share the fixed length
    drawn = np.random.default_rng(0).integers(len(cycles), size=(_RESAMPLES, len(cycles)))
    samples = np.vstack([np.arange(len(cycles)), drawn])
    medians = {kind: np.median(np.array(steps)[samples], axis=(1, 2)) for kind, steps in relative.items()}
    unit_s = typical(levels_s)  # as t_draft is: of the machine at its best
    stops = {}
    for kind, mixture in mixtures.items():
        added_s = unit_s * (sum(share * medians[timed] for timed, share in mixture.items()) - medians[_FIXED])
        stops[kind] = max(0.0, float(added_s[0])), float(added_s[1:].std())
    return stops


def sizes(policies: Mapping[str, Policy], num_draft_weights: int) -> dict[str, float]:
    """Bytes of each policy's heads over those of the draft, both in one precision; 0 where there is no head."""
    return {
        kind: sum(weight.numel() for head in policy.heads for weight in head.parameters()) / num_draft_weights
        for kind, policy in policies.items()
    }
