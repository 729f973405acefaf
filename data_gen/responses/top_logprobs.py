"""The target's distribution p under the run's `Sampling`, from the log-probabilities of the N likeliest tokens,
which a server returns for each position of a response. The result is p itself or a `RefusedError`, never an
approximation.

A server computes log-probabilities at temperature 1 over its whole vocabulary, so they are logits minus a
constant per position, to which law 4.1 is applied over the tokenizer's ids alone. docs/servers.md lists the
samplings that the N likeliest determine. Of equally likely tokens greedy takes the one with the least id.

Equally likely tokens are kept or cut together (as in transformers and vLLM). So k tokens are known to be the k
likeliest only if the k-th is likelier than the last of the N, which needs N > k. Ids beyond the tokenizer's, in a
padded vocabulary, are cut.

A drawn token outside the N likeliest is returned in addition to them, and ignored: it has probability 0 under a
`Sampling` that is determined.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional

from data_gen.responses.exchange import Distributions, RefusedError
from lm import Sampling

_MARGIN = 30
_TOP = 50
"""Tokens requested beyond top-k (in bfloat16 a dozen around the k-th are often equally likely), and the top-k
assumed if there is none.
"""
_MINUS_INFINITY = -9999.0
"""How servers write a log-probability of minus infinity."""
_SUM_ERROR = 1e-3
_RAW = "start the server with --logprobs-mode raw_logprobs"
_MORE = "raise data.server.num_logprobs, or set data.labels: target"
_OTHERWISE = "or set data.labels: target"
_IMPOSSIBLE = (
    "the response's token has probability 0 under pair.sampling; the server uses another sampling, or they belong to "
    "another position"
)


def num_logprobs_of(sampling: Sampling, requested: int | None) -> int:
    """N, the number of log-probabilities requested from a server; ValueError if none determines the distributions."""
    settings = ", ".join(f"{name} {value}" for name, value in sampling.as_dict().items())
    num = requested or (sampling.top_k or _TOP) + _MARGIN
    least = 1 if sampling.is_greedy else sampling.top_k
    if least is None:
        raise ValueError(
            f"data.labels is server with pair.sampling {settings}, where tokens count that a server omits; set "
            f"pair.sampling.top_k (the paper's is 50), {_OTHERWISE}"
        )
    if num <= least:
        raise ValueError(
            f"data.server.num_logprobs is {num} with pair.sampling {settings}: tokens as likely as number {least} "
            f"would be missing; set it to more than {least} (null: {least + _MARGIN}), {_OTHERWISE}"
        )
    return num


def distributions_of(
    positions: Sequence[Mapping[int, float]],
    sampling: Sampling,
    *,
    num_logprobs: int,
    num_ids: int,
    drawn: Sequence[int] | None = None,
) -> Distributions:
    """The distributions from {token id: log-probability} at each position, N of `num_logprobs_of` there, over
    ids below `num_ids`. `drawn`: the tokens that the server drew there. RefusedError if a distribution does not
    follow, or gives its token probability 0.
    """
    ids, values = _likeliest(positions, num_logprobs)
    mass = values.exp().sum(-1)
    lacks = torch.tensor([len(logprobs) < num_logprobs for logprobs in positions]).bool()
    _refuse(~(mass > 0), "no token has any mass")
    _refuse(mass > 1 + _SUM_ERROR, f"their probabilities sum to more than 1; {_RAW}")
    _refuse(~lacks & (values[:, -1] <= _MINUS_INFINITY), f"they are of truncated distributions; {_RAW}")
    is_all = lacks & (mass > 1 - _SUM_ERROR)
    _refuse(lacks & ~is_all, f"the server returned fewer than {num_logprobs}; {_MORE}")
    last = values[:, -1].masked_fill(is_all, -torch.inf)
    values = values.masked_fill(ids >= num_ids, -torch.inf)
    num = 1 if sampling.is_greedy else sampling.top_k
    assert num is not None, "num_logprobs_of refuses such a sampling"
    least = values.topk(min(num, num_logprobs), dim=-1).values[:, -1]
    _refuse((least <= last) & ~is_all, f"others may be as likely as number {num}; {_MORE}")
    probs = sampling.probs(values, torch.float64)
    if drawn is not None:  # equally likely tokens may fall on either side of a limit
        of_drawn = [logprobs[token] for logprobs, token in zip(positions, drawn, strict=True)]
        least = values.masked_fill(probs == 0, torch.inf).amin(-1)
        _refuse(torch.tensor(of_drawn, dtype=torch.float64) < least, _IMPOSSIBLE)
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    width = int((probs > 0).sum(-1).max()) if len(probs) else 0
    ids = ids.gather(-1, order)[:, :width]
    probs = probs[:, :width]
    return Distributions(ids.masked_fill(probs == 0, 0).int(), probs.float())


def joined_distributions(distributions: Sequence[Distributions | None]) -> Distributions:
    """The distributions of several responses, one after the other; none may be None."""
    parts = [Distributions(torch.zeros(0, 0, dtype=torch.int32), torch.zeros(0, 0))]
    parts += [part for part in distributions if part is not None]
    assert len(parts) == 1 + len(distributions)
    width = max(part.ids.shape[-1] for part in parts)
    padded = [[functional.pad(values, (0, width - values.shape[-1])) for values in part] for part in parts]
    return Distributions(*map(torch.cat, zip(*padded, strict=True)))


def _likeliest(
    positions: Sequence[Mapping[int, float]], num: int
) -> tuple[Int[Tensor, "position top"], Float[Tensor, "position top"]]:
    """The `num` likeliest of each position, ties by ascending id; padded with id 0 at minus infinity."""
    width = max([num, *map(len, positions)])
    ids = np.zeros((len(positions), width), np.int64)
    values = np.full((len(positions), width), -np.inf)
    for row, logprobs in enumerate(positions):
        ids[row, : len(logprobs)], values[row, : len(logprobs)] = list(logprobs), list(logprobs.values())
    order = np.lexsort((ids, -values))[:, :num]
    ids = np.take_along_axis(ids, order, axis=-1)
    values = np.take_along_axis(values, order, axis=-1)
    return torch.from_numpy(ids), torch.from_numpy(values)


def _refuse(is_wrong: Bool[Tensor, " position"], reason: str) -> None:
    if is_wrong.any():
        position = int(is_wrong.nonzero()[0])
        raise RefusedError(
            f"the target's distribution at position {position} does not follow from the log-probabilities: {reason}"
        )
