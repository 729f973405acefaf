"""What a stop costs (law 4.9): the seconds that each kind of stop adds to a draft step, inside the real loop.

Policies take turns on every prompt with the same draws, and none of them ever stops before the end of its draft: so all
write the same text in the same rounds, which differ from those of the fixed length by the work of the stop alone.
t_stop is the difference of the first quartiles of their seconds per draft step.

On other hardware a stop is taken to cost what its size says: the head's bytes over the draft's bytes, since a step of a
large model is reading its weights; signals of the distribution are then free. `decode.stop_share` says otherwise.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import hypot
from typing import NamedTuple

import torch

from decode.loop.decoder import SpeculativeDecoder
from decode.policies import FixedLength, HeadPolicy, Policy
from decode.policies.base import AfterDraw, BeforeDraw, Number, Outcome, State
from decode.policies.registry import POLICIES, make_policy
from decode.policies.scores import ScoringPolicy
from evaluation.costs.measure import Loop, error_of, typical
from heads.model.head import AcceptanceHead
from store.progress import Bar

STEPS = 10
"""Tokens of a draft that is timed."""
TOKENS = 48
"""Tokens of a generation that is timed."""
_MOST_TURNS = 6
_ENOUGH = 0.005
"""Share of a draft step: a standard error below which no more turns are taken."""


class Stop(NamedTuple):
    """Seconds that a stop adds to a draft step, with their error."""

    seconds: float
    error_s: float
    """Standard error."""


@dataclass(frozen=True)
class Unstopping(Policy):
    """Does all the work of another policy, and drafts to the end all the same."""

    policy: Policy

    @property
    def signals(self) -> frozenset[str]:  # type: ignore[override]
        return self.policy.signals

    @property
    def fed_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.policy.fed_head

    @property
    def drawn_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.policy.drawn_head

    @property
    def prefix_head(self) -> AcceptanceHead | None:  # type: ignore[override]
        return self.policy.prefix_head

    @property
    def stops_before(self) -> bool:
        return self.policy.stops_before

    @property
    def nothing_learned(self) -> State:
        return self.policy.nothing_learned

    def lesson(self, state: State, drawn: AfterDraw, acceptance_prob: Number) -> State:
        return self.policy.lesson(state, drawn, acceptance_prob)

    def start(self) -> State:
        return self.policy.start()

    def begin(self, state: State) -> State:
        return self.policy.begin(state)

    def stop_before(self, state: State, seen: BeforeDraw) -> Number:
        self.policy.stop_before(state, seen)
        return False

    def after(self, state: State, drawn: AfterDraw) -> tuple[State, Number]:
        state, _ = self.policy.after(state, drawn)
        return state, False

    def end(self, state: State, outcome: Outcome) -> State:
        return self.policy.end(state, outcome)


def policies_by_kind(heads: Iterable[AcceptanceHead], others: Iterable[Policy] = ()) -> dict[str, Policy]:
    """One policy of each kind of stop: the registered ones at their defaults, one head of each shape, and the
    `others`.
    """
    registered = (make_policy(name) for name in POLICIES if name != "head")
    policies = [*registered, *(HeadPolicy(head) for head in heads), *others]
    return {policy.stop_kind: policy for policy in reversed(policies) if policy.stop_kind}


def time_stops(loop: Loop, policies: Mapping[str, Policy]) -> dict[str, Stop]:
    """Time the stop of each of these policies."""
    if not policies:
        return {}
    arms = {"": FixedLength(loop.max_draft_length), **{kind: Unstopping(policy) for kind, policy in policies.items()}}
    decoders = {
        kind: loop.decoder(policy, max_draft_length=min(STEPS, loop.max_draft_length)) for kind, policy in arms.items()
    }
    _turn(decoders, loop, loop.prompts[0])  # a warm-up
    steps_s: dict[str, list[float]] = {kind: [] for kind in arms}
    total = most_generations(len(policies), len(loop.prompts))
    with Bar(total=total, desc=f"costs: stops of {len(policies)} kinds, at most", unit="generations") as bar:
        for _ in range(_MOST_TURNS):
            for prompt in loop.prompts:
                for kind, seconds in _turn(decoders, loop, prompt).items():
                    steps_s[kind] += seconds
                bar.update(len(arms))
            if max(map(error_of, steps_s.values())) < _ENOUGH * typical(steps_s[""]):
                break
    plain_s, plain_error_s = typical(steps_s[""]), error_of(steps_s[""])
    return {
        kind: Stop(max(0.0, typical(steps_s[kind]) - plain_s), hypot(error_of(steps_s[kind]), plain_error_s))
        for kind in policies
    }


def most_generations(num_kinds: int, num_prompts: int) -> int:
    """Generations that `time_stops` takes at most, of `TOKENS` tokens each; the fixed length takes turns with all."""
    return _MOST_TURNS * num_prompts * (num_kinds + 1) if num_kinds else 0


def _turn(decoders: Mapping[str, SpeculativeDecoder], loop: Loop, prompt: list[int]) -> dict[str, list[float]]:
    """Seconds per draft step of every round but the first, which reads the prompt; all decoders play the same
    rounds.
    """
    num_tokens, drafting = min(TOKENS, loop.max_new_tokens), {}
    for kind, decoder in decoders.items():
        played = decoder.generate(prompt, num_tokens, generator=torch.Generator().manual_seed(0)).rounds[1:]
        drafting[kind] = [round_ for round_ in played if round_.drafted]
        assert [round_.drafted for round_ in drafting[kind]] == [round_.drafted for round_ in drafting[""]], (
            "equal draws write equal texts"
        )
    return {
        kind: [round_.draft_s / round_.counts.num_draft_forwards for round_ in played]
        for kind, played in drafting.items()
    }


def sizes(policies: Mapping[str, Policy], num_draft_weights: int) -> dict[str, float]:
    """Bytes of each policy's heads over those of the draft, both in one precision; 0 where there is no head."""
    return {kind: _num_weights(policy) / num_draft_weights for kind, policy in policies.items()}


def _num_weights(policy: Policy) -> int:
    if not isinstance(policy, ScoringPolicy):
        return 0
    return sum(weight.numel() for head in policy.heads for weight in head.parameters())
