"""AdaFlash's length head (arXiv 2607.19223; github.com/ZinYY/AdaFlash at 65d9a5e) in replay: how many tokens of a block
are verified.

It reads the mean of a block's states and its last state, and predicts how many tokens verification accepts. The states
follow from the text before the block, so that the length is known before any token is drawn (B in law 4.3); what a
Markov head adds to them depends on drawn tokens and is not read.

Departures: linear least squares, where theirs has 256 units, a residual layer and a sigmoid; expected instead of greedy
accepted lengths; one constant added to every prediction, which dev chooses, where theirs adds 1 to its labels. A trace
ends a block at EOS, so the mean there is of fewer states than in a loop (docs/results/confidence.md: 0.3 points).
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from decode.policies.base import BeforeDraw, Number, Policy, State
from decode.policies.scores import ScoreHead
from evaluation.traces.trace import LENGTH, Trace

_RIDGE = 1e-9


@dataclass(frozen=True)
class PredictedLength(Policy):
    """Verify as many tokens as the length head predicts and `extra` more, rounded up; perhaps none."""

    extra: Number = 1.0
    signals = frozenset({"prefix_logit"})
    heads: ClassVar[tuple[ScoreHead, ...]] = (ScoreHead("length"),)  # type: ignore[assignment,misc]
    stop_kind: ClassVar[str] = ""  # type: ignore[misc]

    def stop_before(self, state: State, signals: BeforeDraw) -> Number:
        return signals.position >= signals.prefix_logit + self.extra


def fit_length(trace: Trace) -> Float[Tensor, " input"] | None:
    """Weights of the length head, the last one its offset: least squares on the blocks that neither EOS nor a limit
    cuts. The label is the expected accepted length; without decode.perfect_head, the accepted one. None: the trace has
    no blocks, or no hidden states.
    """
    is_whole = torch.from_numpy(trace.branch_lengths) == min(trace.block_size or 0, trace.max_draft_length)
    if trace.block_size is None or not trace.pieces or not is_whole.any():
        return None
    prob = torch.from_numpy(trace.drafts["acceptance_prob"])[trace.num_positions :].double()
    blocks = [block for block, whole in zip(prob.split(trace.branch_lengths.tolist()), is_whole, strict=True) if whole]
    label = torch.stack(blocks).cumprod(1).sum(1)
    if label.isnan().any():
        label = torch.from_numpy(trace.positions["num_passing"])[is_whole].double()
    inputs = _inputs(trace)[is_whole]
    ridge = _RIDGE * len(inputs) * torch.eye(inputs.shape[1], dtype=inputs.dtype)
    return torch.linalg.solve(inputs.T @ inputs + ridge, inputs.T @ label)


def predict_length(trace: Trace, weights: Float[Tensor, " input"]) -> None:
    """Make the head's predictions a signal of the trace, for each token that of its block."""
    predicted = np.zeros(len(trace.token), dtype=np.float32)
    of_block = (_inputs(trace) @ weights).float().numpy()
    predicted[trace.num_positions :] = of_block.repeat(trace.branch_lengths)
    trace.drafts[LENGTH] = predicted


def _inputs(trace: Trace) -> Float[Tensor, "positions input"]:
    """For the block at each position its mean state, its last one, and 1; 0 where a round drafts nothing."""
    hidden, _, embedding = trace.inputs()
    states = hidden[trace.num_positions :, : embedding.shape[1]]  # the rest is a Markov head's
    empty = states.new_zeros(2 * states.shape[1] + 1)
    one = states.new_ones(1)
    blocks = states.split(trace.branch_lengths.tolist())
    rows = [torch.cat([block.mean(0), block[-1], one]) if len(block) else empty for block in blocks]
    return torch.stack(rows).double()
