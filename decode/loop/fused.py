"""One compiled graph per draft step: forward, sampling transform, draw, signals and heads; the host reads one small
tensor. The forward runs eagerly, and the rest is compiled (`lm.compiled`).

The results equal those of `decode.loop.signals`; tests compare the two. A token is drawn by inversion of q with a given
uniform (`lm.draws.UniformSource`), and verification gets the same q. A fed-time head scores the token that is fed; its
scalars stay on the device from the step before.
"""

from collections.abc import Callable, Sequence

import torch
from jaxtyping import Float
from torch import Tensor

from decode.loop.signals import FED, SignalReader, after_draw
from decode.policies.base import AfterDraw, Policy
from lm import CachedModel, GreedySampler, Sampler, Sampling
from lm.compiled import GuardFreeGraph, thread_key
from lm.draws import UniformSource, inverted, refuse_no_token
from lm.signals import POSITION

Compiled = Callable[[], tuple[Tensor, ...]]


class FusedStep(SignalReader):
    """One policy's signals and one sampling on one draft."""

    def __init__(self, policy: Policy, model: CachedModel, sampling: Sampling) -> None:
        super().__init__(policy, model)
        self._cached, self._sampling = model, sampling
        self._columns = ["token", *self.names, *self.heads]
        self._graphs: dict[object, GuardFreeGraph] = {}
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside it
            self._uniform = torch.zeros(1, dtype=torch.float64, device=model.device)
            integers = (torch.zeros(1, dtype=torch.long, device=model.device) for _ in range(3))
            self._forced, self._count, self._fed = integers
            scalars = self.heads[FED].inputs.scalars if FED in self.heads else ()
            self._previous = {name: torch.zeros(1, device=model.device) for name in scalars}
        self._on_host = (self._uniform.numpy(), self._forced.numpy()) if self._uniform.is_cpu else None
        for tensor in (self._uniform, self._forced, self._count, self._fed, *self._previous.values()):
            torch._dynamo.mark_static_address(tensor)

    def step(
        self, position: int, new_tokens: Sequence[int], draws: UniformSource
    ) -> tuple[int, AfterDraw, Float[Tensor, " vocab"]]:
        """Feed these tokens and draw one: it, the signals of the step, and the distribution that it was drawn from."""
        uniform, forced = draws.uniform()
        if self._on_host is not None:
            self._on_host[0][0], self._on_host[1][0] = uniform, forced
        else:
            self._uniform.fill_(uniform)
            self._forced.fill_(forced)
        if POSITION in self.names:
            self._count.fill_(self.num_before + position)
        logits = self._cached.feed(new_tokens)
        self._fed.fill_(new_tokens[-1])
        q, values = self._graph(logits, self.states if self.heads else None)()
        numbers = dict(zip(self._columns, values.tolist(), strict=True))
        token_id = refuse_no_token(int(numbers["token"]), q)
        if position == 0:  # no token of this round is fed yet
            numbers.pop(FED, None)
        return token_id, after_draw(position, numbers), q

    def _graph(self, logits: Float[Tensor, "1 vocab"], hidden: Float[Tensor, "1 hidden"] | None) -> Compiled:
        """The compiled `_epilogue` of a forward, whose results it reads in copies with fixed addresses."""
        given = [logits] if hidden is None else [logits, hidden]
        if not self._graphs:
            self._given = [torch.empty_like(rows) for rows in given]
            for rows in self._given:
                torch._dynamo.mark_static_address(rows)
        if (key := thread_key(logits.device)) not in self._graphs:
            self._graphs[key] = GuardFreeGraph(lambda: self._epilogue(), logits.device)
        for rows, new in zip(self._given, given, strict=True):
            rows.copy_(new)
        return self._graphs[key]

    def _epilogue(self) -> tuple[Float[Tensor, " vocab"], Float[Tensor, " column"]]:
        """q, and the numbers that `_columns` names."""
        logits = self._given[0].clone()  # q may be the logits, which the next forward overwrites
        q = self._sampling.dists(logits)[0]
        token = GreedySampler.draw(q) if self._sampling.is_greedy else inverted(q, self._uniform)
        token = torch.where(self._forced >= 0, self._forced, token)
        state, known = self._given[1][0] if self.heads else None, token.clamp(max=len(q) - 1)
        columns = self.columns(logits[0], known, state, (self._previous, self._fed), self._count)
        for name, number in self._previous.items():
            number.copy_(columns[name])
        wide = torch.float64 if q.is_cpu else torch.float32  # which holds every id below 2^24 exactly
        columns["token"] = token
        return q, torch.cat([columns[name].to(wide) for name in self._columns])


def fused_step(policy: Policy, model: object, sampling: Sampling, draws: Sampler) -> FusedStep | None:
    """The step for this policy; None if nothing is compiled, the draft is on two devices, or tokens must be known."""
    if not isinstance(model, CachedModel) or model.compiled_steps is None:
        return None
    if not isinstance(draws, UniformSource) or not sampling.sees_no_tokens:
        return None
    if model.device != model.output_device or model.device.type == "mps":  # which has no float64
        return None
    steps = model.compiled_steps  # which outlive the drafters
    # a draft that was moved or cast has another
    key = sampling, policy.signals, policy.heads, model.device, model.model.dtype, model.num_logits
    if key not in steps:
        steps[key] = FusedStep(policy, model, sampling)
    return steps[key]
