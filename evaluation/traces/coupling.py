"""Law 4.10: one response becomes a trace row, from which every policy can be replayed.

At each position i of a response X ~ p:

    accepted_i ~ Bernoulli(min(1, q_i(X_i) / p_i(X_i)))      the draft would have drawn X_i itself, and it would be
        accepted
    otherwise  b ~ norm(max(0, q_i - p_i))                    the draft draws b, which is rejected; X_i is the residual
        token

This is the maximal coupling of p and q run backwards: marginally the draft's token has law q_i, X_i has law p_i, and
acceptance has exactly verification's probability. From each rejected b the draft goes on alone
(`evaluation.traces.branches`), as far as any round could use it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evaluation.traces.branches import DrawnTokens, grow, read_signals, signal_names, target_log_probs
from evaluation.traces.inputs import TokenInputs
from evaluation.traces.trace import CONFIDENCE, Trace, TraceRow
from lm import FeatureDraft, Sampling, acceptance_prob, acceptance_rate, residual_probs
from lm.branches.branched import Branched, trunk
from lm.branches.probe import check_branches, check_length
from lm.features.dspark import DSpark
from lm.finite import refuse_non_finite
from lm.forwards import chunk_rows, chunks, device_of, logits_of
from lm.uniforms import draw

BRANCHES_AT_ONCE = 128
"""Bounds the attention mask of one tree."""


@dataclass(frozen=True)
class RowRecording:
    """One response: its own positions, then every branch, in this order along `draw`."""

    token: Int[Tensor, " draw"]
    signals: Float[Tensor, "draw signal"]
    """Those of `signal_names`."""
    acceptance_prob: Float[Tensor, " draw"]
    """min(1, p / q) of the token under the run's Sampling; NaN along branches that the target did not see."""
    hidden: Float[Tensor, "draw hidden"]
    """The draft's state that produced the distribution; at a branch's first token, that of the position it stems
    from.
    """
    is_rejected: Bool[Tensor, " position"]
    acceptance_rate: Float[Tensor, " position"]
    branch_lengths: Int[Tensor, " rejected"]
    """0 where no round can draft (the last position before the length limit)."""
    num_passing: Int[Tensor, " position"] | None = None
    """Passing tokens of a feature draft, as `Trace` has it."""

    @classmethod
    def of(cls, draws: DrawnTokens, acceptance_prob: Tensor, **of_places: Tensor) -> "RowRecording":
        """Couple all draws with the known outcome of each position."""
        return cls(
            token=draws.token.int(),
            acceptance_prob=acceptance_prob,
            hidden=draws.hidden,
            signals=draws.signals,
            **of_places,
        )


@dataclass(frozen=True)
class Path:
    """Outcomes and signals along a response, from one forward of each model."""

    drawn: DrawnTokens
    acceptance_prob: Tensor
    acceptance_rate: Tensor
    is_rejected: Tensor
    rejected: DrawnTokens
    """The rejected draws, one per rejected position."""
    rejected_acceptance_prob: Tensor


@dataclass(frozen=True)
class Recorder:
    """Makes trace rows.

    Attributes:
        max_draft_length: the longest draft that a replayed policy may make.
        has_target_branches: run the target over the branches too, which the perfect head needs.
        chunk_mb: bound of one float32 [positions, vocabulary] chunk.
        draft_sampling: the draft's own sampling, where it is not the target's. At temperature 0 each q is a point mass:
            its token is accepted with probability p of it, and the coin is whether the response has that very token.
    """

    draft: PreTrainedModel | FeatureDraft
    target: PreTrainedModel
    sampling: Sampling
    vocab_size: int
    eos_ids: frozenset[int]
    max_draft_length: int
    has_target_branches: bool = True
    chunk_mb: int = 64
    draft_sampling: Sampling | None = None

    @property
    def num_uniforms(self) -> int:
        """Uniforms per response position: acceptance, the rejected draw, the steps of its branch."""
        return 2 + max(0, self.max_draft_length - 1)

    @property
    def drafting(self) -> Sampling:
        """The sampling that drafted tokens are drawn by."""
        return self.draft_sampling or self.sampling

    @torch.inference_mode()
    def record(
        self, prompt_ids: list[int], response_ids: list[int], limit: int, chance: Float[Tensor, "position uniform"]
    ) -> RowRecording:
        """The trace of one response.

        Args:
            prompt_ids: at least one token.
            response_ids: X, EOS included if there is one.
            limit: the length limit that the generation had, at least len(response_ids).
            chance: float64 uniforms, on the CPU.
        """
        assert isinstance(self.draft, PreTrainedModel), "a feature draft's trace is made by evaluation.traces.chains"
        ids = prompt_ids + response_ids[:-1]
        for model in (self.draft, self.target):
            check_branches(model)
            check_length(model, len(ids) + self.max_draft_length, num_prompt=len(prompt_ids))
        draft_cache, draft_hidden = trunk(self.draft, ids)
        target_cache, target_hidden = trunk(self.target, ids)
        start = len(prompt_ids) - 1
        path = self.path(
            draft_hidden[start:], target_hidden[start:].to(draft_hidden.device), response_ids, chance[:, :2]
        )
        positions = path.is_rejected.nonzero().squeeze(-1)
        # each verification adds a token of the target's, so that the last position before the limit cannot be drafted
        limits = (limit - 1 - positions).clamp(0, self.max_draft_length)
        lengths = torch.zeros_like(positions)
        parts, probs = [path.drawn], [path.acceptance_prob]
        for group in (limits > 0).nonzero().squeeze(-1).split(BRANCHES_AT_ONCE):
            roots = positions[group] + len(prompt_ids)
            tree = Branched(self.draft, self.vocab_size, draft_cache, roots)
            drawn, lengths[group] = self._branches(
                tree, path.rejected.at(group), limits[group], chance[positions[group].cpu(), 2:]
            )
            parts.append(drawn)
            first = path.rejected_acceptance_prob[group]
            probs.append(self.branch_acceptance(target_cache, roots, drawn, lengths[group], first))
        of_places = {
            "is_rejected": path.is_rejected,
            "acceptance_rate": path.acceptance_rate,
            "branch_lengths": lengths,
        }
        return RowRecording.of(DrawnTokens.joined(parts), torch.cat(probs), **of_places)

    def path(self, draft_hidden: Tensor, target_hidden: Tensor, response_ids: list[int], chance: Tensor) -> Path:
        """Outcomes and signals along the response, chunk by chunk of its positions."""
        tokens = torch.tensor(response_ids, device=draft_hidden.device)
        parts = [
            self._path_chunk(draft_hidden[chunk], target_hidden[chunk], tokens[chunk], chance[: len(tokens)][chunk])
            for chunk in chunks(len(tokens), chunk_rows(self.vocab_size, self.chunk_mb))
        ]
        plain = {
            name: torch.cat([getattr(part, name) for part in parts])
            for name in ("acceptance_prob", "acceptance_rate", "is_rejected", "rejected_acceptance_prob")
        }
        drawn = DrawnTokens.joined([part.drawn for part in parts])
        rejected = DrawnTokens.joined([part.rejected for part in parts])
        return Path(drawn=drawn, rejected=rejected, **plain)

    def _path_chunk(self, draft_hidden: Tensor, target_hidden: Tensor, tokens: Tensor, chance: Tensor) -> Path:
        q_logits, p = self.draft_logits(draft_hidden), self.target_probs(target_hidden).to(draft_hidden.device)
        q = self.drafting.probs(q_logits)
        chance = chance.to(q.device)
        # the coupling runs backwards: the response's token was drawn from p, so q and p change places
        is_rejected = ~(chance[:, 0] < acceptance_prob(tokens, q=p, p=q))
        draws = draw(residual_probs(q=p[is_rejected], p=q[is_rejected]), chance[is_rejected, 1])
        rejected = read_signals(q_logits[is_rejected], draws, q[is_rejected], draft_hidden[is_rejected])
        return Path(
            drawn=read_signals(q_logits, tokens, q, draft_hidden),
            acceptance_prob=acceptance_prob(tokens, q, p),
            acceptance_rate=acceptance_rate(q, p),
            is_rejected=is_rejected,
            rejected=rejected,
            rejected_acceptance_prob=acceptance_prob(draws, q[is_rejected], p[is_rejected]),
        )

    def draft_logits(self, hidden: Tensor, where: str = "along a response of a trace") -> Tensor:
        """The draft's logits of the tokenizer's ids."""
        if isinstance(self.draft, FeatureDraft):
            logits = self.draft.logits(hidden)[..., : self.vocab_size]
        else:
            logits = logits_of(self.draft, hidden, self.vocab_size)
        refuse_non_finite(logits, "the draft", where)
        return logits

    def target_probs(self, hidden: Tensor) -> Tensor:
        """p of each position, on the target's device."""
        logits = logits_of(self.target, hidden.to(device_of(self.target)), self.vocab_size)
        refuse_non_finite(logits, "the target", "along a response of a trace")
        return self.sampling.probs(logits)

    def _branches(
        self, tree: Branched, first: DrawnTokens, limits: Tensor, chance: Tensor
    ) -> tuple[DrawnTokens, Tensor]:
        rest = grow(tree, first.token, limits, chance, sampling=self.drafting, eos_ids=self.eos_ids)
        tree.cut()
        owners = torch.arange(len(first.token), device=limits.device)
        order = torch.cat([owners, owners.repeat_interleave(rest.lengths)]).argsort(stable=True)
        return DrawnTokens.joined([first, rest.drawn]).at(order), rest.lengths + 1

    def branch_acceptance(
        self, cache: DynamicCache, roots: Tensor, drawn: DrawnTokens, lengths: Tensor, first: Tensor
    ) -> Tensor:
        """acceptance_prob of every token of some branches."""
        starts = lengths.cumsum(0) - lengths
        result = torch.full_like(drawn.log_q, float("nan"))
        result[starts] = first
        if self.has_target_branches:
            device = device_of(self.target)
            tree = Branched(self.target, self.vocab_size, cache, roots.to(device))
            log_p = target_log_probs(tree, drawn.token.to(device), lengths.to(device), self.sampling, self.chunk_mb)
            tree.cut()
            is_rest = torch.ones_like(result, dtype=torch.bool)
            is_rest[starts] = False
            result[is_rest] = (log_p.to(result.device) - drawn.log_q[is_rest]).clamp(max=0.0).exp()
        return result


def trace_of(row: TraceRow, recorded: RowRecording, recorder: Recorder) -> Trace:
    """The recording of one response, in memory as replay reads it."""
    arrays = {name: value.detach().cpu() for name, value in vars(recorded).items() if value is not None}
    hidden = arrays.pop("hidden")
    token = arrays["token"].numpy()
    columns = dict(zip(signal_names(), arrays["signals"].unbind(-1), strict=True))
    columns["acceptance_prob"] = arrays["acceptance_prob"]
    blocks = recorder.draft if isinstance(recorder.draft, DSpark) else None
    if blocks is not None and blocks.confidence_head is not None:
        with torch.inference_mode():
            columns[CONFIDENCE] = blocks.confidence(recorded.hidden).cpu()
    return Trace(
        rows=(row,),
        sampling=recorder.sampling,
        draft_sampling=recorder.draft_sampling,
        max_draft_length=recorder.max_draft_length,
        token=token,
        is_eos=np.isin(token, sorted(recorder.eos_ids)),
        signals={name: column.float().contiguous().numpy() for name, column in columns.items()},
        is_rejected=arrays["is_rejected"].numpy(),
        acceptance_rate=arrays["acceptance_rate"].float().numpy(),
        branch_lengths=arrays["branch_lengths"].numpy(),
        inputs=_inputs_of(recorder.draft, hidden, arrays["token"]),
        num_passing=None if recorded.num_passing is None else arrays["num_passing"].numpy(),
        block_size=None if blocks is None else blocks.block_size,
    )


@torch.inference_mode()
def _inputs_of(draft: PreTrainedModel | FeatureDraft, hidden: torch.Tensor, token: torch.Tensor) -> TokenInputs:
    """Hidden states, and the embeddings of the tokens that occur: far fewer than the vocabulary has."""
    ids = token.unique()
    layer = draft.embedding if isinstance(draft, FeatureDraft) else draft.get_input_embeddings()
    return TokenInputs.of(hidden, ids, layer(ids.to(next(layer.parameters()).device)).to("cpu", hidden.dtype))
