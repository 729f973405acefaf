"""Law 4.10: one response becomes a trace row, from which every policy can be replayed.

At each position i of a response X ~ p:

    accepted_i ~ Bernoulli(min(1, q_i(X_i) / p_i(X_i)))      the draft would have drawn X_i, and it would be accepted
    otherwise  b ~ norm(max(0, q_i - p_i))                    the draft draws b, which is rejected; X_i is the residual
        token

This is the maximal coupling of p and q run backwards: marginally the draft's token has distribution q_i, X_i has p_i,
and acceptance has exactly verification's probability. From each rejected b the draft continues alone
as far as any round could use it, all branches of a response at once (`lm.batch`), until an EOS or the branch's limit.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from evaluation.traces.trace import CONFIDENCE, InputTensors, Trace, TraceRow
from lm import FeatureDraft, Sampling, acceptance_prob, acceptance_rate, residual_probs
from lm.batch import Continuations, check_branch_length, check_branches, read_prefix
from lm.draws import draw
from lm.features.dspark import DSpark
from lm.forwards import chunk_rows, chunks, device_of, logits_of
from lm.sampling import refuse_non_finite
from lm.signals import signals_of, stored_scalars

BRANCHES_AT_ONCE = 128
"""Bounds the attention mask of one tree."""


class DrawnTokens(NamedTuple):
    """Tokens that a draft drew, and what is known of the distributions that it drew from, [draw] each."""

    token: Int[Tensor, " draw"]
    log_q: Float[Tensor, " draw"]
    """Under the sampling that the draft draws by."""
    signals: Float[Tensor, "draw signal"]
    """Those of `signal_names`, untruncated and at temperature 1."""
    hidden: Float[Tensor, "draw hidden"]
    """The draft's state that produced the distribution."""
    acceptance_prob: Float[Tensor, " draw"]
    """min(1, p / q) of the token under the run's Sampling; NaN where the target has not read the tokens before it."""

    def at(self, rows: Tensor) -> "DrawnTokens":
        """The draws of some rows."""
        return DrawnTokens(*(values[rows] for values in self))

    @staticmethod
    def joined(parts: "Sequence[DrawnTokens]") -> "DrawnTokens":
        """Draws of several parts, one after the other."""
        return DrawnTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


class Path(NamedTuple):
    """Outcomes along a response, from one forward of each model."""

    drawn: DrawnTokens
    """The response's tokens."""
    rejected: DrawnTokens
    """The rejected draws, one per rejected position."""
    is_rejected: Bool[Tensor, " position"]
    acceptance_rate: Float[Tensor, " position"]


@dataclass(frozen=True)
class Recorder:
    """Makes trace rows.

    Attributes:
        max_draft_length: the longest draft that a replayed policy may make.
        has_target_branches: run the target over the branches too, which the perfect head needs.
        chunk_mb: bound of one float32 [positions, vocabulary] chunk.
        draft_sampling: the draft's sampling, if it is not the target's. At temperature 0 each q is a point mass: its
            token is accepted with probability p of it, and the coin is whether the response has that very token.
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
    def record(self, row: TraceRow, uniforms: Float[Tensor, "position uniform"]) -> Trace:
        """The trace of one response.

        Args:
            row: a prompt of at least one token, and the response X, EOS included if there is one.
            uniforms: float64, on the CPU.
        """
        assert isinstance(self.draft, PreTrainedModel), "a feature draft's trace is made by evaluation.traces.chains"
        prompt, response = list(row.prompt_ids), list(row.response_ids)
        ids = prompt + response[:-1]
        for model in (self.draft, self.target):
            check_branches(model)
            check_branch_length(model, len(ids) + self.max_draft_length, num_prompt=len(prompt))
        draft_cache, draft_hidden = read_prefix(self.draft, ids)
        target_cache, target_hidden = read_prefix(self.target, ids)
        start = len(prompt) - 1
        path = self.path(draft_hidden[start:], target_hidden[start:].to(draft_hidden.device), response, uniforms[:, :2])
        positions = path.is_rejected.nonzero().squeeze(-1)
        # each verification adds a token of the target's, so the last position before the limit cannot be drafted
        limits = (row.limit - 1 - positions).clamp(0, self.max_draft_length)
        lengths, parts = torch.zeros_like(positions), [path.drawn]
        for group in (limits > 0).nonzero().squeeze(-1).split(BRANCHES_AT_ONCE):
            roots, numbers = positions[group] + len(prompt), uniforms[positions[group].cpu(), 2:]
            tree = Continuations(self.draft, self.vocab_size, draft_cache, roots)
            first = path.rejected.at(group)
            drawn, lengths[group] = grow(
                tree, first, limits[group], numbers, sampling=self.drafting, eos_ids=self.eos_ids
            )
            tree.drop()
            parts.append(self.with_acceptance(target_cache, roots, drawn, lengths[group]))
        outcomes = {"is_rejected": path.is_rejected, "acceptance_rate": path.acceptance_rate}
        return self.trace_of(row, DrawnTokens.joined(parts), outcomes, lengths)

    def path(self, draft_hidden: Tensor, target_hidden: Tensor, response_ids: list[int], uniforms: Tensor) -> Path:
        """Outcomes and signals along the response, chunk by chunk of its positions."""
        tokens = torch.tensor(response_ids, device=draft_hidden.device)
        parts = [
            self._path_chunk(draft_hidden[chunk], target_hidden[chunk], tokens[chunk], uniforms[: len(tokens)][chunk])
            for chunk in chunks(len(tokens), chunk_rows(self.vocab_size, self.chunk_mb))
        ]
        drawn, rejected, is_rejected, rates = zip(*parts, strict=True)
        return Path(DrawnTokens.joined(drawn), DrawnTokens.joined(rejected), torch.cat(is_rejected), torch.cat(rates))

    def _path_chunk(self, draft_hidden: Tensor, target_hidden: Tensor, tokens: Tensor, uniforms: Tensor) -> Path:
        q_logits, p = self.draft_logits(draft_hidden), self.target_probs(target_hidden).to(draft_hidden.device)
        q = self.drafting.probs(q_logits)
        uniforms = uniforms.to(q.device)
        # the coupling runs backwards: the response's token was drawn from p, so q and p change roles
        is_rejected = ~(uniforms[:, 0] < acceptance_prob(tokens, q=p, p=q))
        draws = draw(residual_probs(q=p[is_rejected], p=q[is_rejected]), uniforms[is_rejected, 1])
        prob = acceptance_prob(draws, q[is_rejected], p[is_rejected])
        rejected = read_signals(q_logits[is_rejected], draws, q[is_rejected], draft_hidden[is_rejected], prob)
        drawn = read_signals(q_logits, tokens, q, draft_hidden, acceptance_prob(tokens, q, p))
        return Path(drawn, rejected, is_rejected, acceptance_rate(q, p))

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

    def with_acceptance(self, cache: DynamicCache, roots: Tensor, drawn: DrawnTokens, lengths: Tensor) -> DrawnTokens:
        """Tokens of some branches with their acceptance_prob, which only the first token of each has so far."""
        if not self.has_target_branches:
            return drawn
        device = device_of(self.target)
        tree = Continuations(self.target, self.vocab_size, cache, roots.to(device))
        log_p = target_log_probs(tree, drawn.token.to(device), lengths.to(device), self.sampling, self.chunk_mb)
        tree.drop()
        is_rest = torch.ones_like(drawn.token, dtype=torch.bool)
        is_rest[lengths.cumsum(0) - lengths] = False
        prob = drawn.acceptance_prob.clone()
        prob[is_rest] = (log_p.to(prob.device) - drawn.log_q[is_rest]).clamp(max=0.0).exp()
        return drawn._replace(acceptance_prob=prob)

    def trace_of(
        self,
        row: TraceRow,
        drawn: DrawnTokens,
        outcomes: Mapping[str, Tensor],
        branch_lengths: Int[Tensor, " rejected"],
    ) -> Trace:
        """The recording of one response, in memory as replay reads it.

        Args:
            row: the response.
            drawn: its path, then its branches.
            outcomes: the columns of `Trace.positions`.
            branch_lengths: 0 where no round can draft (the last position before the length limit).
        """
        token = drawn.token.int().cpu()
        signals = dict(zip(signal_names(), drawn.signals.unbind(-1), strict=True))
        signals["acceptance_prob"] = drawn.acceptance_prob
        blocks = self.draft if isinstance(self.draft, DSpark) else None
        if blocks is not None and blocks.confidence_head is not None:
            signals[CONFIDENCE] = blocks.confidence(drawn.hidden)
        drafts = {name: column.float().cpu().contiguous().numpy() for name, column in signals.items()}
        columns = {name: values.float() if values.is_floating_point() else values for name, values in outcomes.items()}
        layer = self.draft.embedding if isinstance(self.draft, FeatureDraft) else self.draft.get_input_embeddings()
        ids = token.unique()  # far fewer than the vocabulary has
        embedding = layer(ids.to(next(layer.parameters()).device)).to("cpu", drawn.hidden.dtype)
        return Trace(
            rows=(row,),
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            max_draft_length=self.max_draft_length,
            drafts={"token": token.numpy(), "is_eos": np.isin(token, sorted(self.eos_ids)), **drafts},
            positions={name: values.cpu().numpy() for name, values in columns.items()},
            branch_lengths=branch_lengths.cpu().numpy(),
            inputs=partial(InputTensors, drawn.hidden.cpu(), ids, embedding),
            block_size=None if blocks is None else blocks.block_size,
        )


def signal_names() -> tuple[str, ...]:
    """Names of the signals that a trace has of every token: max_prob, top_prob, then the scalars that heads read."""
    return "max_prob", "top_prob", *stored_scalars()


def read_signals(
    logits: Float[Tensor, "draw vocab"],
    token: Int[Tensor, " draw"],
    q: Float[Tensor, "draw vocab"],
    hidden: Float[Tensor, "draw hidden"],
    acceptance_prob: Float[Tensor, " draw"] | None = None,
) -> DrawnTokens:
    """Drawn tokens with the signals of the logits that they were drawn from; no acceptance_prob: NaN."""
    columns = signals_of(logits, token, signal_names())
    log_q = q.gather(-1, token.unsqueeze(-1)).squeeze(-1).log()
    prob = torch.full_like(log_q, float("nan")) if acceptance_prob is None else acceptance_prob
    return DrawnTokens(token, log_q, torch.stack([columns[name] for name in signal_names()], -1), hidden, prob)


def draft_by_draft(
    steps: Sequence[DrawnTokens], owners: Sequence[Tensor], num_drafts: int
) -> tuple[DrawnTokens, Int[Tensor, " draft"]]:
    """(tokens of parallel drafts, sorted by draft and step; the length of each draft), from the tokens of each step and
    the drafts that they belong to.
    """
    owner = torch.cat(list(owners))
    return DrawnTokens.joined(steps).at(owner.argsort(stable=True)), torch.bincount(owner, minlength=num_drafts)


@torch.inference_mode()
def grow(
    tree: Continuations,
    first: DrawnTokens,
    limits: Int[Tensor, " branch"],
    uniforms: Float[Tensor, "branch step"],
    *,
    sampling: Sampling,
    eos_ids: frozenset[int],
) -> tuple[DrawnTokens, Int[Tensor, " branch"]]:
    """Draft on from each first token: (all tokens, branch by branch, the first ones included; each branch's length).

    Args:
        tree: the draft, at the positions of the rejected draws.
        first: the rejected draws.
        limits: the most tokens of each branch, the first included.
        uniforms: what tokens are drawn by, on the CPU.
        sampling: the sampling that the draft draws by.
        eos_ids: a branch ends with one.
    """
    tokens = first.token
    alive = torch.arange(len(tokens), device=tokens.device)
    eos = torch.tensor(sorted(eos_ids), device=tokens.device, dtype=tokens.dtype)
    steps, owners = [first], [alive]
    for depth in range(uniforms.shape[1]):
        can_grow = (limits[alive] > depth + 1) & ~torch.isin(tokens, eos)
        alive, tokens = alive[can_grow], tokens[can_grow]
        if not len(alive):
            break
        hidden = tree.feed(tokens, alive, torch.full_like(alive, depth))
        logits = logits_of(tree.model, hidden, tree.vocab_size)
        refuse_non_finite(logits, "the draft", "along a branch of a trace")
        q = sampling.probs(logits)
        tokens = draw(q, uniforms[alive.cpu(), depth])
        steps.append(read_signals(logits, tokens, q, hidden))
        owners.append(alive)
    return draft_by_draft(steps, owners, len(limits))


@torch.inference_mode()
def target_log_probs(
    tree: Continuations,
    tokens: Int[Tensor, " draw"],
    lengths: Int[Tensor, " branch"],
    sampling: Sampling,
    chunk_mb: int,
) -> Tensor:
    """log p of every token of some branches except the first of each, [draws - branches], in one forward of the target.

    Args:
        tree: the target, which reads all branches at once.
        tokens: branch by branch, the first token of each included.
        lengths: tokens of each branch, the first included.
        sampling: the sampling of the run.
        chunk_mb: bound of one [draws, vocabulary] chunk.
    """
    owners = torch.arange(len(lengths), device=tokens.device).repeat_interleave(lengths)
    starts = lengths.cumsum(0) - lengths
    depths = torch.arange(len(tokens), device=tokens.device) - starts[owners]
    is_fed = depths < lengths[owners] - 1  # nobody needs the distribution after a branch's last token
    if not is_fed.any():
        return torch.zeros(0, device=tokens.device)
    hidden = tree.feed(tokens[is_fed], owners[is_fed], depths[is_fed])
    next_tokens = tokens[depths > 0]
    parts = []
    for chunk in chunks(len(hidden), chunk_rows(tree.vocab_size, chunk_mb)):
        p = sampling.probs(logits_of(tree.model, hidden[chunk], tree.vocab_size))
        parts.append(p.gather(-1, next_tokens[chunk, None]).squeeze(-1).log())
    return torch.cat(parts)
