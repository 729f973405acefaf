"""What a stop costs (law 4.9): the seconds that each kind of stop adds to a draft step of the real loop.

Policies draft after the same text in turns, and none of them stops before the end of its draft, so drafts differ only
by the work of the stop. The target verifies each draft, which is then discarded. A cycle is a draft of each kind, and a
few of the fixed length, in a new order every time. The machine's speed changes from cycle to cycle, so each draft is
compared with its own cycle:

    r = seconds per draft step / median of the cycle
    t_stop / t_draft = median r of the kind / median r of the fixed length - 1

The share is kept, and not the seconds: a stop that is timed on a busy day counts as the same part of a draft step.

Cycles continue for `BUDGET_S` seconds: more kinds take no longer, and are less sure, which their errors say.

On other hardware a stop is taken to cost what its size says: the head's bytes over the draft's bytes, since a step of a
large model is reading its weights; signals of the distribution are then free. `decode.stop_share` says otherwise.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from statistics import median
from time import perf_counter
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from jaxtyping import Float, Int

from decode.experiment import Experiment
from decode.policies import FixedLength, HeadPolicy, Policy
from decode.policies.base import AfterDraw, BeforeDraw, Number, State
from decode.policies.registry import POLICIES, SOLVED, policy_of
from evaluation.costs.measure import Loop
from evaluation.regression import resampled_errors
from evaluation.times import StopShares
from evaluation.turns import turns_within
from heads.model.head import AcceptanceHead

if TYPE_CHECKING:
    from decode.loop.drafter import ModelDrafter

STEPS = 10
"""Tokens of a draft that is timed."""
BUDGET_S = 15.0
"""Seconds that stops are timed for; longer where `FEWEST_CYCLES` take longer."""
FEWEST_CYCLES = 6
NUM_FIXED = 3
FIXED = ""
"""Rounds of the fixed length in a cycle, with which every kind is compared."""
_RESAMPLES = 200

Draft = tuple[str, float]
"""A timed draft: the kind of its stop, and the seconds of a draft step; of a DSpark draft, of its whole block."""
Stop = tuple[float, float]
"""(what a stop adds to a draft step, over the step's seconds; its standard error)."""


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
    registered = (policy_of(name, {}) for name in POLICIES if name not in SOLVED)
    policies = [*registered, *(HeadPolicy(head) for head in heads), *others]
    return {policy.stop_kind: policy for policy in reversed(policies) if policy.stop_kind}


def time_stops(loop: Loop, policies: Mapping[str, Policy]) -> dict[str, Stop]:
    """Time the stop of these policies, by kind, after the loop's first prompt; ValueError if none is drafted."""
    if not policies:
        return {}
    from lm import CachedModel

    length = drafted_length(loop)
    prompt = loop.prompts[0]
    target = loop.models.target
    every = {FIXED: FixedLength(length), **{kind: unstopping(policy) for kind, policy in policies.items()}}
    drafters = _drafters_of(loop, every, prompt)
    text = [*prompt, int(target.feed(prompt).argmax())]
    order = np.random.default_rng(0)

    @torch.inference_mode()
    def timed(kind: str) -> float:
        drafter = drafters[kind]
        if isinstance(drafter.model, CachedModel) and (pending := text[len(drafter.model) : -1]):
            drafter.model.feed(pending)
        started_s = perf_counter()
        proposal = drafter.propose(text, length)
        seconds = perf_counter() - started_s
        # the draft is verified, as in the loop; reading a number waits for the device
        target.feed(text[len(target) :] + proposal.tokens, length + 1)[-1, 0].item()
        target.roll_back(len(prompt))
        drafter.roll_back(len(prompt))
        return seconds / proposal.num_draft_forwards

    def cycle() -> list[Draft]:
        return [(kind, timed(kind)) for kind in order.permutation([*policies, *[FIXED] * NUM_FIXED]).tolist()]

    cycle()  # a warm-up
    desc = f"costs: stops of {len(policies)} kinds"
    cycles = [cycle() for _ in turns_within(BUDGET_S, FEWEST_CYCLES, desc=desc, unit="cycles")]
    return stops_of(cycles, list(policies))


def _drafters_of(loop: Loop, policies: Mapping[str, Policy], prompt: list[int]) -> "dict[str, ModelDrafter]":
    from decode.loop.drafter import ModelDrafter
    from decode.loop.session import Session
    from lm import RandomSampler

    # never opened, so that several drafters may take one model
    session = Session(loop.sampling, loop.eos_ids, RandomSampler(torch.Generator().manual_seed(0)), prompt)
    session.take(loop.models.target, "target", verifies=True)
    drafters = {}
    for kind, policy in policies.items():
        drafters[kind] = ModelDrafter(loop.models.draft_for(policy), policy)
        drafters[kind].start(session)
    return drafters


def drafted_length(loop: Loop) -> int:
    """Tokens of each draft that is timed; ValueError if the loop drafts none."""
    from lm.features.dspark import DSpark

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
    """The stops in these cycles; an error is that of resampled cycles (`evaluation.regression.resampled_errors`)."""
    steps = {kind: np.array([_steps_of(kind, cycle) for cycle in cycles]) for kind in (FIXED, *kinds)}

    def shares(sample: Int[np.ndarray, " some_cycles"]) -> Float[np.ndarray, " kind"]:
        """What each stop adds to a draft step, over the step's seconds."""
        fixed = np.median(steps[FIXED][sample])
        return np.array([np.median(steps[kind][sample]) / fixed - 1 for kind in kinds])

    values = np.maximum(0.0, shares(np.arange(len(cycles)))).tolist()
    errors = resampled_errors(shares, len(cycles), _RESAMPLES).tolist()
    return dict(zip(kinds, zip(values, errors, strict=True), strict=True))


def _steps_of(kind: str, cycle: Sequence[Draft]) -> list[float]:
    """Seconds of a draft step of this kind, over the median of the cycle."""
    level_s = median(step_s for _, step_s in cycle)
    return [step_s / level_s for name, step_s in cycle if name == kind]


def sizes(policies: Mapping[str, Policy], num_draft_weights: int) -> dict[str, float]:
    """Bytes of each policy's heads over those of the draft, both in one precision; 0 where there is no head."""
    return {
        kind: sum(weight.numel() for head in policy.heads for weight in head.parameters()) / num_draft_weights
        for kind, policy in policies.items()
    }


def shares_of(experiment: Experiment, policies: Mapping[str, Policy], measured: Mapping[str, float]) -> StopShares:
    """t_stop / t_draft of each kind at times that are not measured, as decode.stop_share says."""
    share = experiment.decode.stop_share
    if share == "measured" and measured:
        return StopShares("stops' shares as measured here", measured)
    if "draft" in experiment.presumed:
        return StopShares("stops free: the draft is not here, to tell a head's share of its size", {})
    by_size = sizes(policies, experiment.num_draft_weights)
    if isinstance(share, str):
        return StopShares("stops' shares by size", by_size)
    weights = measured or by_size
    largest = max(weights.values(), default=0.0) or 1.0
    scaled = {kind: share * weight / largest for kind, weight in weights.items()}
    return StopShares(f"most expensive stop {share:.1%} of a draft step", scaled)
