"""Law 4.10: one response becomes a trace row, from which every policy can be replayed.

At each position i of a response X ~ p:

    accepted_i ~ Bernoulli(min(1, q_i(X_i) / p_i(X_i)))      the draft would have drawn X_i, and it would be accepted
    otherwise  b ~ norm(max(0, q_i - p_i))                    the draft draws b, which is rejected; X_i is the residual
        token

This is the maximal coupling of p and q run backwards: marginally the draft's token has distribution q_i, X_i has p_i,
and acceptance has exactly verification's probability. From each rejected b the draft continues alone as far as any
round could use it, until an EOS or the branch's limit. All branches of a response are drafted side by side.

A feature draft continues on its own outputs, so its token at position s + j of a round that starts at s has a
distribution q(s, j) that no other start has. It drafts from every s where a round may start, and the coupling is at
each (s, j). A position's two uniforms, for the coin and for the rejected draw, serve whichever round comes there: the
rounds of one generation never share a position, so each of their coins is independent, and counts keep their
distribution. The first round of a generation drafts nothing, since the target has not run yet.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers import PreTrainedModel

from data_gen.labels.branches import ReadText, check_branches
from data_gen.labels.rollout import Rollouts, rollouts_of
from evaluation.traces.trace import CONFIDENCE, InputTensors, Trace, TraceRow, whole_piece
from lm import FeatureDraft, Sampling, acceptance_prob, acceptance_rate, residual_probs
from lm.draws import draw
from lm.features.dspark import DSpark
from lm.forwards import chunk_rows, chunks, device_of, logits_of
from lm.sampling import refuse_non_finite
from lm.signals import Normalised, signals_of, stored_scalars

_DRAFTS_AT_ONCE = 128
"""Bounds the attention mask of drafts side by side."""
_SIGNALS = ("max_prob", "top_prob", *stored_scalars())
"""Signals that a trace has of every token; the last ones are the scalars that heads read."""
Draws = dict[str, Tensor]
"""Columns [draw] of drawn tokens: token; log_q, under the sampling that the draft draws by; `_SIGNALS`, untruncated and
at temperature 1; acceptance_prob, min(1, p / q) under the run's Sampling, NaN where the target has not read the tokens
before; hidden [draw, hidden], the state that q follows from.
"""


class Reading(NamedTuple):
    """A response as both models have read it; states are on the draft's device."""

    num_prompt: int
    token: Int[Tensor, " position"]
    drafts: ReadText | Rollouts
    draft_hidden: Float[Tensor, "position hidden"]
    """The draft's state that each position's q follows from, if a round begins there."""
    target_hidden: Float[Tensor, "position hidden"]
    """The target's state that each position's p follows from."""
    target: ReadText
    uniforms: Float[Tensor, "position uniform"]
    """Float64, on the CPU: for the coin, the rejected draw, and the steps of its branch."""


@dataclass(frozen=True)
class Recorder:
    """Makes traces of single responses.

    Attributes:
        max_draft_length: the longest draft that a replayed policy may make.
        has_target_branches: run the target over the branches too, which the perfect head needs.
        chunk_mb: size of a float32 [positions, vocabulary] chunk.
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
        """Uniforms per response position (`Reading.uniforms`)."""
        return 2 + max(0, self.max_draft_length - 1)

    @torch.inference_mode()
    def record(self, row: TraceRow, uniforms: Float[Tensor, "position uniform"]) -> Trace:
        """The trace of one response to a prompt of at least one token; `uniforms` as `Reading` has them."""
        text = self._read(row, uniforms)
        path, first, is_accepted, rate = self._path(text)
        positions = torch.arange(len(text.token), device=text.token.device)
        # each verification adds a token of the target's, so the last position before the limit cannot be drafted
        room = (row.limit - 1 - positions).clamp(0, int(min(self.max_draft_length, text.drafts.max_length)))
        is_feature_draft = isinstance(self.draft, FeatureDraft)
        room[positions == 0 if is_feature_draft else is_accepted] = 0
        lengths = torch.zeros_like(positions)
        passing = torch.zeros_like(positions)
        parts = [path]
        for starts in (room > 0).nonzero().squeeze(-1).split(_DRAFTS_AT_ONCE):
            begun = taken(first, starts), is_accepted[starts].long()
            drawn, lengths[starts], passing[starts] = self._drafts(text, begun, starts, room[starts])
            if self.has_target_branches:
                self._add_acceptance(text, drawn, lengths[starts], passing[starts], starts)
            parts.append(drawn)
        columns = {"acceptance_rate": rate.float(), "branch_lengths": lengths, "is_rejected": ~is_accepted}
        if is_feature_draft:
            columns |= {"is_rejected": torch.ones_like(is_accepted), "num_passing": passing}
        return self._trace_of(row, joined_draws(parts), columns)

    def _read(self, row: TraceRow, uniforms: Tensor) -> Reading:
        num_prompt = len(row.prompt_ids)
        num = len(row.response_ids)
        lag = self.draft.lag if isinstance(self.draft, FeatureDraft) else 0
        ids = [*row.prompt_ids, *row.response_ids][: max(num_prompt + num - 1, 1 + lag)]
        for model in (self.draft, self.target):
            if isinstance(model, PreTrainedModel):
                check_branches(model, len(ids) + self.max_draft_length, num_prompt=num_prompt)
        drafts: ReadText | Rollouts
        if isinstance(self.draft, FeatureDraft):
            drafts = rollouts_of(self.target, self.draft, ids)
            target = drafts.target_text
        else:
            drafts = ReadText(self.draft, ids)
            target = ReadText(self.target, ids)
        draft_hidden = drafts.begin((torch.arange(num) + num_prompt).clamp(min=1 + lag))
        token = torch.tensor(row.response_ids, device=draft_hidden.device)
        target_hidden = target.hidden[num_prompt - 1 :][:num].to(token.device)
        return Reading(num_prompt, token, drafts, draft_hidden, target_hidden, target, uniforms)

    def _path(self, text: Reading) -> tuple[Draws, Draws, Tensor, Tensor]:
        """Along the response, chunk by chunk of its positions: its tokens; the draft's own (the response's where they
        are accepted, else the rejected draws); whether they are accepted; and the acceptance_rate.
        """
        parts = []
        for chunk in chunks(len(text.token), chunk_rows(self.vocab_size, self.chunk_mb)):
            token = text.token[chunk]
            hidden = text.draft_hidden[chunk]
            logits = self._draft_logits(hidden)
            p = self._target_probs(text.target_hidden[chunk]).to(hidden.device)
            q = self._drafting.probs(logits)
            drawn = read_signals(logits, token, q, hidden, acceptance_prob(token, q, p))
            first, is_accepted = coupled(q, p, token, text.uniforms[: len(text.token)][chunk].to(q.device))
            at = (~is_accepted).nonzero().squeeze(-1)
            prob = acceptance_prob(first[at], q[at], p[at])
            rejected = read_signals(logits[at], first[at], q[at], hidden[at], prob)
            both = {name: column.index_copy(0, at, rejected[name]) for name, column in drawn.items()}
            parts.append((drawn, both, is_accepted, acceptance_rate(q, p)))
        tokens, firsts, are_accepted, rates = zip(*parts, strict=True)
        return joined_draws(tokens), joined_draws(firsts), torch.cat(are_accepted), torch.cat(rates)

    def _drafts(
        self, text: Reading, begun: tuple[Draws, Tensor], starts: Int[Tensor, " draft"], room: Int[Tensor, " draft"]
    ) -> tuple[Draws, Int[Tensor, " draft"], Int[Tensor, " draft"]]:
        """Draft on from the first token of each start, for at most `room` tokens: (all tokens, draft by draft; the
        length of each draft; how many of its tokens come before the first rejected one). `begun`: those first tokens,
        and 1 for each that is accepted.
        """
        text.drafts.begin(starts + text.num_prompt)
        first, passing = begun
        alive = torch.arange(len(starts), device=starts.device)
        newest = first["token"]
        eos = torch.tensor(sorted(self.eos_ids), device=starts.device, dtype=newest.dtype)
        steps = [first]
        owners = [alive]
        for depth in range(1, self.max_draft_length):
            can_grow = (room[alive] > depth) & ~torch.isin(newest, eos)
            alive = alive[can_grow]
            newest = newest[can_grow]
            if not len(alive):
                break
            hidden = text.drafts.feed(newest, alive)
            logits = self._draft_logits(hidden, "along a draft of a trace")
            q = self._drafting.probs(logits)
            newest, prob, is_accepted = self._next(text, q, (starts + passing)[alive], depth - passing[alive])
            passing[alive] += is_accepted
            steps.append(read_signals(logits, newest, q, hidden, prob))
            owners.append(alive)
        owner = torch.cat(owners)
        drawn = taken(joined_draws(steps), owner.argsort(stable=True))
        return drawn, torch.bincount(owner, minlength=len(starts)), passing

    def _next(self, text: Reading, q: Tensor, positions: Tensor, since: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The next token of each draft from q [draft, vocab], its acceptance_prob (NaN after a rejection), and whether
        it is accepted. `positions`: of that token, or of the draft's rejected one, which is `since` tokens back (0:
        none).
        """
        token = torch.empty_like(positions)
        is_accepted = torch.zeros_like(positions, dtype=torch.bool)
        prob = torch.full_like(q[:, 0], float("nan"))
        off = since.nonzero().squeeze(-1)
        on = (since == 0).nonzero().squeeze(-1)
        token[off] = draw(q[off], text.uniforms[positions[off].cpu(), 1 + since[off].cpu()])
        at = positions[on]
        p = self._target_probs(text.target_hidden[at]).to(q.device)
        token[on], is_accepted[on] = coupled(q[on], p, text.token[at], text.uniforms[at.cpu()].to(q.device))
        prob[on] = acceptance_prob(token[on], q[on], p)
        return token, prob, is_accepted

    def _add_acceptance(self, text: Reading, drawn: Draws, lengths: Tensor, passing: Tensor, starts: Tensor) -> None:
        """Set the acceptance_prob of what follows a rejected token, by one forward of the target over all branches."""
        device = device_of(self.target)
        owners = torch.arange(len(lengths), device=lengths.device).repeat_interleave(lengths)
        depths = torch.arange(len(owners), device=lengths.device) - (lengths.cumsum(0) - lengths + passing)[owners]
        is_read = (depths >= 0) & (depths < (lengths - passing)[owners] - 1)  # a branch's last token has no follower
        if not is_read.any():
            return
        roots = starts + passing + text.num_prompt
        text.target.begin(roots.clamp(max=len(text.target.hidden)))  # a draft that passes whole has no branch
        hidden = text.target.feed(drawn["token"][is_read], owners[is_read])
        token = drawn["token"][depths > 0].to(device)
        parts = []
        for chunk in chunks(len(hidden), chunk_rows(self.vocab_size, self.chunk_mb)):
            p = self.sampling.probs(logits_of(self.target, hidden[chunk], self.vocab_size))
            parts.append(p.gather(-1, token[chunk, None]).squeeze(-1).log())
        log_p = torch.cat(parts).to(lengths.device)
        log_q = drawn["log_q"][depths > 0]
        drawn["acceptance_prob"][depths > 0] = (log_p - log_q).clamp(max=0.0).exp()

    @property
    def _drafting(self) -> Sampling:
        return self.draft_sampling or self.sampling

    def _draft_logits(self, hidden: Tensor, where: str = "along a response of a trace") -> Tensor:
        if isinstance(self.draft, FeatureDraft):
            logits = self.draft.logits(hidden)[..., : self.vocab_size]
        else:
            logits = logits_of(self.draft, hidden, self.vocab_size)
        refuse_non_finite(logits, "the draft", where)
        return logits

    def _target_probs(self, hidden: Tensor) -> Tensor:
        logits = logits_of(self.target, hidden.to(device_of(self.target)), self.vocab_size)
        refuse_non_finite(logits, "the target", "along a response of a trace")
        return self.sampling.probs(logits)

    def _trace_of(self, row: TraceRow, drawn: Draws, positions: dict[str, Tensor]) -> Trace:
        """The recording of one response, in memory as replay reads it; `drawn`: its path, then its branches."""
        token = drawn["token"].int().cpu()
        hidden = drawn["hidden"]
        signals = {name: drawn[name] for name in (*_SIGNALS, "acceptance_prob")}
        blocks = self.draft if isinstance(self.draft, DSpark) else None
        if blocks is not None and blocks.confidence_head is not None:
            signals[CONFIDENCE] = blocks.confidence(hidden)
        layer = self.draft.embedding if isinstance(self.draft, FeatureDraft) else self.draft.get_input_embeddings()
        ids = token.unique()  # far fewer than the vocabulary has
        embedding = layer(ids.to(next(layer.parameters()).device)).to("cpu", hidden.dtype)
        return Trace(
            rows=(row,),
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            max_draft_length=self.max_draft_length,
            drafts={"token": token.numpy(), "is_eos": np.isin(token, sorted(self.eos_ids))}
            | {name: column.float().cpu().contiguous().numpy() for name, column in signals.items()},
            positions={name: column.cpu().numpy() for name, column in positions.items()},
            pieces=(whole_piece(partial(InputTensors, hidden.cpu(), ids, embedding), len(token)),),
            block_size=None if blocks is None else blocks.block_size,
        )


def coupled(
    q: Float[Tensor, "position vocab"],
    p: Float[Tensor, "position vocab"],
    response: Int[Tensor, " position"],
    uniforms: Float[Tensor, "position uniform"],
) -> tuple[Int[Tensor, " position"], Bool[Tensor, " position"]]:
    """The draft's token at each position of a response, and whether verification accepts it: the maximal coupling run
    backwards. The response's token was drawn from p, so q and p change roles.
    """
    is_accepted = uniforms[:, 0] < acceptance_prob(response, q=p, p=q)
    residual = residual_probs(q=p[~is_accepted], p=q[~is_accepted])
    token = response.clone()
    token[~is_accepted] = draw(residual, uniforms[~is_accepted, 1])
    return token, is_accepted


def read_signals(
    logits: Float[Tensor, "draw vocab"],
    token: Int[Tensor, " draw"],
    q: Float[Tensor, "draw vocab"],
    hidden: Float[Tensor, "draw hidden"],
    acceptance_prob: Float[Tensor, " draw"],
) -> Draws:
    """Drawn tokens with the signals of the logits that they were drawn from."""
    log_q = q.gather(-1, token.unsqueeze(-1)).squeeze(-1).log()
    columns = {"token": token, "log_q": log_q, "hidden": hidden, "acceptance_prob": acceptance_prob}
    return columns | signals_of(Normalised(logits), token, _SIGNALS)


def taken(draws: Draws, rows: Int[Tensor, " row"]) -> Draws:
    """The draws of some rows."""
    return {name: column[rows] for name, column in draws.items()}


def joined_draws(parts: Sequence[Draws]) -> Draws:
    """Draws of several parts, one after the other."""
    return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
