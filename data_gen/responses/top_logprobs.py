"""The target's distribution p under the run's `Sampling`, from the log-probabilities of the N likeliest tokens, which a
server returns for each position of a response. The result is p itself or a `RefusedError`, never an
approximation.

A server computes log-probabilities at temperature 1 over its whole vocabulary, so they are logits minus a constant per
position. Given the N likeliest, over the tokenizer's ids alone (law 4.1):

    greedy         the likeliest token; of several that are equally likely, the one with the least id
    top-k < N      softmax of the k likeliest over temperature, at any temperature, and top-p of that, if there is one
    top-p alone    at temperature 1, where a log-probability is the token's share of the total mass
    neither        refused, as is top-p alone at another temperature: every token of the vocabulary counts

Equally likely tokens are kept or cut together (as in transformers and vLLM). So k tokens are known to be the k
likeliest only if the k-th is likelier than the last of the N, which needs N > k. Ids beyond the tokenizer's, in a
padded vocabulary, are cut. This does not affect top-k; for top-p alone the mass of cut ids that were not returned is
known only up to the rest to 1, so such a position may be undetermined.

A drawn token outside the N likeliest is returned in addition to them, and ignored: it has probability 0 under a
`Sampling` that is determined.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from data_gen.responses.exchange import Distributions, RefusedError
from lm import Sampling

_MARGIN, _TOP = 30, 50
"""Tokens requested beyond top-k (in bfloat16 a dozen around the k-th are often equally likely), and the top-k assumed
if there is none.
"""
_MINUS_INFINITY = -9999.0
"""How servers write a log-probability of minus infinity."""
_SUM_ERROR = 1e-3
_RAW = "start the server with --logprobs-mode raw_logprobs"
_MORE = "raise data.server.num_logprobs, or set data.labels: target"
_OTHERWISE = "or set data.labels: target"


def num_logprobs_of(sampling: Sampling, requested: int | None) -> int:
    """N, the number of log-probabilities requested from a server; ValueError if none determines the distributions."""
    settings = ", ".join(f"{name} {value}" for name, value in sampling.as_dict().items())
    num = requested or (sampling.top_k or _TOP) + _MARGIN
    if sampling.is_greedy or sampling.top_k is not None:
        least = 1 if sampling.is_greedy else sampling.top_k or 1
        if num <= least:
            raise ValueError(
                f"data.server.num_logprobs is {num} with pair.sampling {settings}: tokens as likely as number {least} "
                f"would be missing; set it to more than {least} (null: {least + _MARGIN}), {_OTHERWISE}"
            )
        return num
    if sampling.top_p is None or sampling.top_p == 1:
        reason = "where every token of the vocabulary counts"
    elif sampling.temperature != 1:
        reason = "but the mass of the tokens that a server omits is known at temperature 1 only"
    else:
        return num
    raise ValueError(
        f"data.labels is server with pair.sampling {settings}, {reason}; set pair.sampling.top_k (the paper's is 50), "
        f"{_OTHERWISE}"
    )


@dataclass(frozen=True, kw_only=True)
class DistributionReader:
    """Turns log-probabilities into distributions."""

    sampling: Sampling
    num_logprobs: int
    """N, of `num_logprobs_of`."""
    num_ids: int
    """One more than the tokenizer's largest id."""
    is_padded: bool = False
    """Whether the server's vocabulary may have further ids."""

    def distributions(self, positions: Sequence[Mapping[int, float]]) -> Distributions:
        """The distributions from {token id: log-probability} at each position; RefusedError if one lacks."""
        ids, values = _likeliest(positions, self.num_logprobs)
        mass = values.exp().sum(-1)
        lacks = torch.tensor([len(logprobs) < self.num_logprobs for logprobs in positions]).bool()
        _refuse(~(mass > 0), "no token has any mass")
        _refuse(mass > 1 + _SUM_ERROR, f"their probabilities sum to more than 1; {_RAW}")
        _refuse(~lacks & (values[:, -1] <= _MINUS_INFINITY), f"they are of truncated distributions; {_RAW}")
        is_all = lacks & (mass > 1 - _SUM_ERROR)
        _refuse(lacks & ~is_all, f"the server returned fewer than {self.num_logprobs}; {_MORE}")
        last = values[:, -1].masked_fill(is_all, -torch.inf)
        values = values.masked_fill(ids >= self.num_ids, -torch.inf)
        if self.sampling.is_greedy or self.sampling.top_k is not None:
            num = 1 if self.sampling.is_greedy else self.sampling.top_k or 1
            least = values.topk(min(num, self.num_logprobs), dim=-1).values[:, -1]
            _refuse((least <= last) & ~is_all, f"others may be as likely as number {num}; {_MORE}")
            return _by_support(ids, self.sampling.probs(values, torch.float64))
        is_kept = self._nucleus(values, is_all)
        least = values.masked_fill(~is_kept, torch.inf).amin(-1)
        _refuse((least <= last) & ~is_all, f"the {self.num_logprobs} likeliest hold less than top_p; {_MORE}")
        return _by_support(ids, Sampling().probs(values.masked_fill(~is_kept, -torch.inf), torch.float64))

    def _nucleus(
        self, values: Float[Tensor, "position top"], is_all: Bool[Tensor, " position"]
    ) -> Bool[Tensor, "position top"]:
        """Which tokens top-p alone keeps: those that together with all less likely ones hold more than 1 - top_p.

        The mass of the tokenizer's ids is 1, or in a padded vocabulary at least the returned part.
        """
        ascending, order = values.exp().sort(dim=-1, stable=True)  # as in transformers, so that ties are broken alike
        returned = ascending.sum(-1, keepdim=True)
        most = torch.where(is_all.unsqueeze(-1), returned, 1.0)
        bound = 1 - float(self.sampling.top_p or 1.0)
        by_total = [
            ascending.cumsum(-1) + total - returned > bound * total
            for total in (most, returned if self.is_padded else most)
        ]
        _refuse(
            (by_total[0] != by_total[1]).any(-1),
            f"which tokens top_p keeps depends on the mass of ids beyond the tokenizer's; {_MORE}",
        )
        by_total[0][:, -1] = True
        return torch.zeros_like(by_total[0]).scatter(-1, order, by_total[0])


def joined(distributions: Sequence[Distributions | None]) -> Distributions:
    """The distributions of several responses, one after the other; none may be None."""
    known = [part for part in distributions if part is not None]
    assert len(known) == len(distributions)
    width = max((part.ids.shape[-1] for part in known), default=0)
    parts = [[torch.nn.functional.pad(values, (0, width - values.shape[-1])) for values in part] for part in known]
    if not parts:
        return Distributions(torch.zeros(0, width, dtype=torch.int32), torch.zeros(0, width))
    return Distributions(*map(torch.cat, zip(*parts, strict=True)))


def _likeliest(
    positions: Sequence[Mapping[int, float]], num: int
) -> tuple[Int[Tensor, "position top"], Float[Tensor, "position top"]]:
    """The `num` likeliest of each position, ties by ascending id; padded with id 0 at minus infinity."""
    lengths = np.array([len(logprobs) for logprobs in positions], dtype=np.int64)
    flat_ids = np.fromiter(chain.from_iterable(positions), np.int64, lengths.sum())
    all_values = chain.from_iterable(logprobs.values() for logprobs in positions)
    flat_values = np.fromiter(all_values, np.float64, lengths.sum())
    rows = np.repeat(np.arange(len(positions)), lengths)
    order = np.lexsort((flat_ids, -flat_values, rows))
    columns = np.arange(len(order)) - np.repeat(lengths.cumsum() - lengths, lengths)
    is_in = columns < num
    ids = np.zeros((len(positions), num), np.int64)
    values = np.full((len(positions), num), -np.inf)
    ids[rows[is_in], columns[is_in]] = flat_ids[order][is_in]
    values[rows[is_in], columns[is_in]] = flat_values[order][is_in]
    return torch.from_numpy(ids), torch.from_numpy(values)


def _by_support(ids: Int[Tensor, "position top"], probs: Float[Tensor, "position top"]) -> Distributions:
    probs, order = probs.sort(dim=-1, descending=True, stable=True)
    width = int((probs > 0).sum(-1).max()) if len(probs) else 0
    ids, probs = ids.gather(-1, order)[:, :width], probs[:, :width]
    return Distributions(ids.masked_fill(probs == 0, 0).int(), probs.float())


def _refuse(is_wrong: Bool[Tensor, " position"], reason: str) -> None:
    if is_wrong.any():
        position = int(is_wrong.nonzero()[0])
        raise RefusedError(
            f"the target's distribution at position {position} does not follow from the log-probabilities: {reason}"
        )
