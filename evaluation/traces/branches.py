"""Branches of a trace (law 4.10): what the draft would have gone on to say after each rejected draw, all branches of a
response at once (`lm.branches.branched`). A branch ends at EOS, or at its limit.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from lm import Sampling
from lm.branches.branched import Branched
from lm.finite import refuse_non_finite
from lm.forwards import chunk_rows, chunks, logits_of
from lm.signals import SCALARS, signals_of
from lm.uniforms import draw


class DrawnTokens(NamedTuple):
    """Tokens that a draft drew, and the untruncated temperature-1 signals of the distributions that it drew from,
    [draw] each.
    """

    token: Int[Tensor, " draw"]
    log_q: Float[Tensor, " draw"]
    """Under the sampling that the draft draws by."""
    signals: Float[Tensor, "draw signal"]
    """max_prob, top_prob, then every scalar that heads may read: `signal_names`."""
    hidden: Float[Tensor, "draw hidden"]
    """The state that produced the distribution."""

    def at(self, rows: Tensor) -> "DrawnTokens":
        """The draws of some rows."""
        return DrawnTokens(*(values[rows] for values in self))

    @staticmethod
    def joined(parts: "Sequence[DrawnTokens]") -> "DrawnTokens":
        """Draws of several parts, one after the other."""
        return DrawnTokens(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def read_signals(
    logits: Float[Tensor, "draw vocab"],
    token: Int[Tensor, " draw"],
    q: Float[Tensor, "draw vocab"],
    hidden: Float[Tensor, "draw hidden"],
) -> DrawnTokens:
    """The signals of tokens and of the logits that they were drawn from."""
    columns = signals_of(logits, token, signal_names())
    signals = torch.stack([columns[name] for name in signal_names()], -1)
    return DrawnTokens(token, q.gather(-1, token.unsqueeze(-1)).squeeze(-1).log(), signals, hidden)


def signal_names() -> tuple[str, ...]:
    """The names of the numbers that a trace keeps of a token and of the distribution that it was drawn from."""
    return "max_prob", "top_prob", *SCALARS


class Branches(NamedTuple):
    """Drafts after the first token of each branch: branch by branch, each in order."""

    drawn: DrawnTokens
    lengths: Int[Tensor, " branch"]
    """Tokens drawn of each branch, the first not included."""


@torch.inference_mode()
def grow(
    tree: Branched,
    first: Int[Tensor, " branch"],
    limits: Int[Tensor, " branch"],
    chance: Float[Tensor, "branch step"],
    *,
    sampling: Sampling,
    eos_ids: frozenset[int],
) -> Branches:
    """Draft on from each first token.

    Args:
        first: the rejected draws.
        limits: the most tokens of each branch, the first included.
        chance: uniforms that tokens are drawn by, on the CPU.
        sampling: the sampling that the draft draws by.
        eos_ids: a branch ends with one.
    """
    device = first.device
    alive, tokens = torch.arange(len(first), device=device), first
    steps: list[DrawnTokens] = []
    owners: list[Tensor] = []
    eos = torch.tensor(sorted(eos_ids), device=device, dtype=first.dtype)
    for depth in range(chance.shape[1]):
        going = (limits[alive] > depth + 1) & ~torch.isin(tokens, eos)
        alive, tokens = alive[going], tokens[going]
        if not len(alive):
            break
        hidden = tree.feed(tokens, alive, torch.full_like(alive, depth))
        logits = logits_of(tree.model, hidden, tree.vocab_size)
        refuse_non_finite(logits, "the draft", "along a branch of a trace")
        q = sampling.probs(logits)
        tokens = draw(q, chance[alive.cpu(), depth])
        steps.append(read_signals(logits, tokens, q, hidden))
        owners.append(alive)
    if not steps:
        return Branches(_nothing(tree, first), torch.zeros_like(first))
    owner = torch.cat(owners)
    # steps came one after the other: stable sorting by branch keeps each branch's order
    order = owner.argsort(stable=True)
    return Branches(DrawnTokens.joined(steps).at(order), torch.bincount(owner, minlength=len(first)))


def _nothing(tree: Branched, first: Int[Tensor, " branch"]) -> DrawnTokens:
    empty = torch.zeros(0, len(signal_names()), device=first.device)
    hidden = torch.zeros(
        0, tree.model.config.get_text_config().hidden_size, device=first.device, dtype=tree.model.dtype
    )
    return DrawnTokens(first[:0], empty[:, 0], empty, hidden)


@torch.inference_mode()
def target_log_probs(
    tree: Branched, tokens: Int[Tensor, " draw"], lengths: Int[Tensor, " branch"], sampling: Sampling, chunk_mb: int
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
    is_fed = depths < lengths[owners] - 1  # the last of a branch predicts nothing that is asked for
    if not is_fed.any():
        return torch.zeros(0, device=tokens.device)
    hidden = tree.feed(tokens[is_fed], owners[is_fed], depths[is_fed])
    next_tokens = tokens[depths > 0]
    parts = []
    for chunk in chunks(len(hidden), chunk_rows(tree.vocab_size, chunk_mb)):
        p = sampling.probs(logits_of(tree.model, hidden[chunk], tree.vocab_size))
        parts.append(p.gather(-1, next_tokens[chunk, None]).squeeze(-1).log())
    return torch.cat(parts)
