"""Branches of a trace (law 4.10): what the draft goes on to draw after each rejected draw, all branches of a response
at once (`lm.batch`). A branch ends at EOS, or at its limit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm import Sampling
from lm.batch import Continuations
from lm.draws import draw
from lm.forwards import chunk_rows, chunks, logits_of
from lm.sampling import refuse_non_finite
from lm.signals import SCALARS, signals_of


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


def signal_names() -> tuple[str, ...]:
    """Names of the signals that a trace has of every token: max_prob, top_prob, then the scalars that heads read."""
    return "max_prob", "top_prob", *SCALARS


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
