"""One compiled graph per draft step: forward, sampling transform, draw, signals and heads; the host reads one small
tensor. The forward runs eagerly, and the rest is compiled (`lm.compiled`).

The results equal those of `decode.loop.signals`, which serves eager drafts; tests compare the two.
A token is drawn by inversion of q with a given uniform (`lm.draws.UniformSource`); verification gets the same q. A
fed-time head scores the token that is fed; its signals stay on the device from the step before.
"""

from math import exp
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from decode.loop.reading import Reader, numbers_of, scored
from decode.policies.base import AfterDraw, Policy
from lm import CachedModel, Sampler, Sampling, UniformSource
from lm.draws import greedy_token, inverted, refuse_no_token

_INFINITY = float("inf")


class _Step(NamedTuple):
    """Numbers of one step, in the order in which they come to the host; zero where nobody asks."""

    token: float
    entropy: float = 0.0
    max_prob: float = 0.0
    log_token_prob: float = 0.0
    fed_logit: float = 0.0
    prefix_logit: float = 0.0
    drawn_logit: float = 0.0
    top_prob: float = 0.0


class FusedStep(Reader):
    """One policy's signals and one sampling on one draft."""

    def __init__(self, policy: Policy, model: CachedModel, sampling: Sampling) -> None:
        super().__init__(policy, model)
        self._model, self._sampling = model, sampling
        assert model.epilogues is not None
        self._epilogues = model.epilogues
        with torch.inference_mode(False):  # memory made in inference mode could not be written to outside it
            self._uniform = torch.zeros(1, dtype=torch.float64, device=model.device)
            self._forced = torch.zeros(1, dtype=torch.long, device=model.device)
            self._before = {
                name: torch.zeros(1, device=model.device)
                for name in ([] if self.fed is None else self.fed.inputs.scalars)
            }
        self._on_host = (self._uniform.numpy(), self._forced.numpy()) if self._uniform.is_cpu else None
        assert model.with_hidden or not self.has_heads, "a head scores hidden states: the draft must keep them"
        for tensor in (self._uniform, self._forced, *self._before.values()):
            torch._dynamo.mark_static_address(tensor)

    def draw(
        self, position: int, token_ids: list[int], draws: UniformSource
    ) -> tuple[int, AfterDraw, Float[Tensor, " vocab"]]:
        """Draw a token after these: it, the signals of the step, and the law that it was drawn from.

        Raises:
            ValueError: the law is not finite.
        """
        uniform, forced = draws.uniform()
        if self._on_host is not None:
            self._on_host[0][0], self._on_host[1][0] = uniform, forced
        else:
            self._uniform.fill_(uniform)
            self._forced.fill_(forced)
        logits = self._model.forward(token_ids)
        hidden = self._model.hidden if self._model.with_hidden else None
        law, numbers = self._epilogues(self._tail, logits, hidden, token_ids[-1])
        step = _Step(*numbers.tolist())
        token_id = refuse_no_token(int(step.token), law)
        drawn = AfterDraw(
            position=position,
            entropy=step.entropy,
            max_prob=step.max_prob,
            fed_logit=step.fed_logit if position > 0 else _INFINITY,
            prefix_logit=step.prefix_logit,
            token_prob=exp(step.log_token_prob),
            drawn_logit=step.drawn_logit,
            top_prob=step.top_prob,
        )
        return token_id, drawn, law

    def _tail(
        self, logits: Float[Tensor, "1 vocab"], hidden: Float[Tensor, "1 hidden"] | None, fed: Int[Tensor, " 1"]
    ) -> tuple[Float[Tensor, " vocab"], Float[Tensor, " 8"]]:
        """The law, and a `_Step` of numbers."""
        law = self._sampling.laws_after(logits, ())[0]
        token = greedy_token(law) if self._sampling.is_greedy else inverted(law, self._uniform)
        token = torch.where(self._forced >= 0, self._forced, token)
        columns: dict[str, Tensor] = {}
        if self.needs_distribution or self.has_heads:
            known = token.clamp(max=len(law) - 1)
            columns = numbers_of(logits[0], known, self._scalars.union(_Step._fields))
            if self.fed is not None and hidden is not None:
                columns["fed_logit"] = scored(self.fed, hidden[0], self._before, fed)
                for name, number in self._before.items():
                    number.copy_(columns[name])
            if self.prefix is not None and hidden is not None:
                columns["prefix_logit"] = scored(self.prefix, hidden[0], columns, known)
            if self.drawn is not None and hidden is not None:
                columns["drawn_logit"] = scored(self.drawn, hidden[0], columns, known)
        wide = torch.float64 if law.is_cpu else torch.float32  # exact for ids below 2^24
        nothing = torch.zeros(1, dtype=wide, device=law.device)
        columns["token"] = token
        return law, torch.cat([columns[name].to(wide) if name in columns else nothing for name in _Step._fields])


def fused_step(policy: Policy, model: object, sampling: Sampling, draws: Sampler) -> FusedStep | None:
    """The step for this policy; None if nothing is compiled, the draft is on two devices, or tokens must be known."""
    if not isinstance(model, CachedModel) or model.epilogues is None:
        return None
    if not isinstance(draws, UniformSource) or not sampling.sees_no_tokens:
        return None
    if model.device != model.output_device or model.device.type == "mps":  # which has no float64
        return None
    made = model.epilogues.cache  # which outlive the drafters that ask for them
    key = sampling, policy.signals, policy.heads, model.device  # a draft that was moved has another
    if key not in made:
        made[key] = FusedStep(policy, model, sampling)
    return made[key]
