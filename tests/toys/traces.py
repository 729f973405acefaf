"""Every trace of a pair of toys with its probability, enumerated by its definition (law 4.10): a response from p;
outcomes min(1, q/p); rejected draws from norm(max(0, q - p)); branches from q. All become rows of one trace.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product

import numpy as np
import pytest
import torch

from evaluation.traces.trace import InputTensors, Trace, TraceRow, whole_piece
from lm import Sampling, acceptance_prob, acceptance_rate, entropy, residual_probs
from lm.signals import Normalised, signals_of
from tests.toys.enumeration import ToyModel
from tests.toys.loop import PROMPT, SAMPLINGS

EOS = 2
Draw = tuple[tuple[int, ...], int]
"""A drawn token and the prefix that it was drawn after."""
Variant = tuple[float, tuple[Draw, ...]]
"""Probability and branch of one position's outcome; no branch: accepted."""


class Toys:
    """Every trace of the toys 1 (target) and 2 (draft)."""

    def __init__(
        self, sampling: Sampling, *, limit: int, length: int, eos_ids: Sequence[int] = (EOS,), draft_sampling=None
    ) -> None:
        self.draft_sampling = draft_sampling
        self.sampling, self.limit, self.length, self.eos_ids = sampling, limit, length, frozenset(eos_ids)
        self.models = {"p": ToyModel(1), "q": ToyModel(2)}

    @lru_cache  # noqa: B019
    def row(self, name: str, prefix: tuple[int, ...]) -> tuple[torch.Tensor, torch.Tensor]:
        """Logits and hidden state after the prompt and `prefix`."""
        model = self.models[name]
        model.reset()
        logits = model.feed([*PROMPT, *prefix])[-1]
        assert model.hidden is not None
        return logits, model.hidden[-1]

    def probs(self, name: str, prefix: tuple[int, ...]) -> torch.Tensor:
        sampling = self.draft_sampling or self.sampling if name == "q" else self.sampling
        return sampling.probs(self.row(name, prefix)[0])

    def responses(self, prefix: tuple[int, ...] = ()) -> Iterator[tuple[float, tuple[int, ...]]]:
        if len(prefix) == self.limit or (prefix and prefix[-1] in self.eos_ids):
            yield 1.0, prefix
            return
        for token, prob in enumerate(self.probs("p", prefix).tolist()):
            if prob > 0:
                yield from ((prob * weight, response) for weight, response in self.responses((*prefix, token)))

    def variants(self, response: tuple[int, ...], position: int) -> list[Variant]:
        """Outcomes of one position of a response."""
        prefix = response[:position]
        p, q = self.probs("p", prefix), self.probs("q", prefix)
        accepted = float(acceptance_prob(torch.tensor(response[position]), q=p, p=q))
        variants: list[Variant] = [(accepted, ())] if accepted > 0 else []
        room = min(self.length, self.limit - 1 - position)
        if accepted < 1 - 1e-12:
            for token, prob in enumerate(residual_probs(q=p, p=q).tolist()):
                weight = (1 - accepted) * prob
                if prob > 0:
                    variants += [(weight * inner, branch) for inner, branch in self.branches(prefix, token, room)]
        return variants

    def branches(self, prefix: tuple[int, ...], token: int, room: int) -> Iterator[Variant]:
        first: Draw = (prefix, token)
        if token in self.eos_ids or room <= 1:
            yield 1.0, (first,)
            return
        for follower, prob in enumerate(self.probs("q", (*prefix, token)).tolist()):
            if prob > 0:
                for weight, rest in self.branches((*prefix, token), follower, room - 1):
                    yield prob * weight, (first, *rest)

    def trace(self) -> tuple[np.ndarray, Trace]:
        """The probability of each row, and the trace that has them all."""
        weights, rows, paths, outcomes, branches = [], [], [], [], []
        for prob, response in self.responses():
            for variants in product(*(self.variants(response, position) for position in range(len(response)))):
                weights.append(prob * np.prod([weight for weight, _ in variants]))
                rows.append(TraceRow(str(len(rows)), "", tuple(PROMPT), response, self.limit))
                paths += [(response[:position], token) for position, token in enumerate(response)]
                outcomes += [bool(branch) for _, branch in variants]
                branches += [branch for _, branch in variants if branch]
        draws = [*paths, *(draw for branch in branches for draw in branch)]
        return np.array(weights), self.trace_of(rows, draws, np.array(outcomes), [len(branch) for branch in branches])

    def trace_of(self, rows: list[TraceRow], draws: list[Draw], is_rejected: np.ndarray, lengths: list[int]) -> Trace:
        seen = list(dict.fromkeys(draws))
        places = {draw: place for place, draw in enumerate(seen)}
        index = np.array([places[draw] for draw in draws])
        logits = torch.stack([self.row("q", prefix)[0] for prefix, _ in seen])
        hidden = torch.stack([self.row("q", prefix)[1] for prefix, _ in seen])
        tokens = torch.tensor([token for _, token in seen])
        q, p = (torch.stack([self.probs(name, prefix) for prefix, _ in seen]) for name in ("q", "p"))
        log_probs, rate = logits.log_softmax(-1), acceptance_rate(q, p)
        branch_lengths = np.zeros(len(is_rejected), dtype=np.int64)
        branch_lengths[is_rejected] = lengths
        rates = rate.numpy()[index[: len(is_rejected)]]
        signals = {
            "token": tokens,
            "is_eos": torch.isin(tokens, torch.tensor(sorted(self.eos_ids))),
            "entropy": entropy(logits),
            "max_prob": log_probs.exp().amax(-1),
            "top_prob": signals_of(Normalised(logits), torch.zeros(len(logits)).long(), ["top_prob"])["top_prob"],
            "log_token_prob": log_probs.gather(-1, tokens[:, None])[:, 0],
            "logit_token_prob": log_probs.exp().gather(-1, tokens[:, None])[:, 0].logit(),
            "logit_max_prob": log_probs.exp().amax(-1).logit(),
            "acceptance_prob": acceptance_prob(tokens, q, p),
        }
        inputs = InputTensors(hidden[index], torch.arange(3), torch.eye(4, dtype=torch.float64)[:3])
        return Trace(
            rows=tuple(rows),
            sampling=self.sampling,
            draft_sampling=self.draft_sampling,
            max_draft_length=self.length,
            drafts={name: values.numpy()[index] for name, values in signals.items()},
            positions={"is_rejected": is_rejected, "branch_lengths": branch_lengths, "acceptance_rate": rates},
            pieces=(whole_piece(lambda: inputs, len(index)),),
        )


@lru_cache
def traced(sampling: str, limit: int, length: int, eos_ids: tuple[int, ...]) -> tuple[np.ndarray, Trace]:
    weights, trace = Toys(SAMPLINGS[sampling], limit=limit, length=length, eos_ids=eos_ids).trace()
    assert weights.sum() == pytest.approx(1, abs=1e-12)
    return weights, trace
