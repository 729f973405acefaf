"""The exact law of a loop's output, by walking every branch of its random choices, and toy models to walk on.

The toys are context-dependent, and they really cache: logits depend on what was fed, not on what was asked, so that a
cache that is off by one position changes the law.
"""

import math
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Sequence
from functools import cache
from typing import TypeVar

import torch
from torch import Tensor

from lm import CachedModel, Sampler, Sampling

Output = TypeVar("Output", bound=Hashable)
Law = dict[tuple[int, ...], float]


def seeded(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


class Branches(Sampler):
    """The draws of one run: scripted as far as the script goes, then the first possible answer each time."""

    def __init__(self, script: Sequence[int]) -> None:
        self.weights: list[list[float]] = []
        self.answers: list[int] = []
        self._script = script

    @property
    def probability(self) -> float:
        """Of the branch that this run took."""
        return math.prod(weights[answer] for weights, answer in zip(self.weights, self.answers, strict=True))

    def next_script(self) -> list[int] | None:
        """The branch after this one, depth first; None after the last."""
        for depth in reversed(range(len(self.answers))):
            weights = self.weights[depth]
            for answer in range(self.answers[depth] + 1, len(weights)):
                if weights[answer] > 0:
                    return [*self.answers[:depth], answer]
        return None

    def token(self, probs: Tensor) -> int:
        return self._answer(probs.tolist())

    def num_accepted(self, acceptance_probs: Iterable[float]) -> int:
        weights, survival = [], 1.0
        for acceptance_prob in acceptance_probs:
            weights.append(survival * (1 - acceptance_prob))
            survival *= acceptance_prob
        return self._answer([*weights, survival])

    def _answer(self, weights: list[float]) -> int:
        depth = len(self.answers)
        is_scripted = depth < len(self._script)
        answer = self._script[depth] if is_scripted else next(i for i, weight in enumerate(weights) if weight > 0)
        self.weights.append(weights)
        self.answers.append(answer)
        return answer


def law_of(play: Callable[[Sampler], Output]) -> dict[Output, float]:
    """Probability of each output of `play`, exactly: the sum over all branches of its draws."""
    law: dict[Output, float] = defaultdict(float)
    script: list[int] | None = []
    while script is not None:
        branches = Branches(script)
        law[play(branches)] += branches.probability
        script = branches.next_script()
    return dict(law)


@torch.no_grad()
def law_by(probs: Callable[[tuple[int, ...]], Tensor], length: int, eos_ids: Collection[int] = ()) -> Law:
    """The law of one model alone: products of its probabilities after the generated tokens, over every sequence."""
    law: Law = {}
    open_ = {(): 1.0}
    for _ in range(length):
        grown = {}
        for tokens, probability in open_.items():
            for token, prob in enumerate(probs(tokens).tolist()):
                if prob > 0:
                    (law if token in eos_ids else grown)[(*tokens, token)] = probability * prob
        open_ = grown
    return law | open_


@cache
def _logits(seed: int, prefix: tuple[int, ...], vocab_size: int, sharpness: float) -> Tensor:
    generator = seeded(hash((seed, prefix)) % 2**31)
    return sharpness * torch.randn(vocab_size, generator=generator, dtype=torch.float64)


class ToyModel(CachedModel):
    """Random logits for every prefix, drawn anew for each seed; hidden states of width 4."""

    def __init__(self, seed: int, vocab_size: int = 3, *, width: int | None = None, sharpness: float = 1.5) -> None:
        """`width`: of raw logits that are padded beyond vocab_size; `sharpness`: the standard deviation of logits."""
        self.vocab_size, self.width, self.seed, self.sharpness = vocab_size, width or vocab_size, seed, sharpness
        self.forwards: list[int] = []
        self.reset()

    def __len__(self) -> int:
        return len(self.fed)

    device = output_device = torch.device("cpu")
    hidden_size = 4
    with_hidden = True
    max_length = float("inf")

    @property
    def num_logits(self) -> int:
        return self.vocab_size

    @property
    def num_embeddings(self) -> int:
        return max(self.width, 4)

    def check_mode(self) -> None:
        """A toy has no modes."""

    def embedding(self, tokens: Tensor) -> Tensor:
        return torch.eye(self.num_embeddings, dtype=torch.float64)[tokens][:, :4]

    def reset(self, num_tokens: int = 0) -> None:
        self.fed: list[int] = []

    def roll_back(self, length: int) -> None:
        del self.fed[length:]

    def feed(self, new_tokens: Sequence[int], num_rows: int = 1) -> Tensor:
        assert 1 <= num_rows <= len(new_tokens), f"{num_rows} rows asked of {len(new_tokens)} fed tokens"
        self.forwards.append(len(new_tokens))
        self.fed += new_tokens
        prefixes = [tuple(self.fed[: len(self.fed) - num_rows + 1 + row]) for row in range(num_rows)]
        return self.rows_after(prefixes)

    def rows_after(self, prefixes: Iterable[tuple[int, ...]]) -> Tensor:
        """Logits after each prefix; sets the hidden states."""
        self.hidden = torch.stack([_logits(self.seed + 1000, prefix, 4, 1.0) for prefix in prefixes])
        logits = torch.stack([_logits(self.seed, prefix, self.width, self.sharpness) for prefix in prefixes])
        return logits[:, : self.vocab_size]

    def feed_drawn(self, token: Tensor) -> Tensor:
        return self.feed([int(token)])

    def law(self, prompt: Sequence[int], length: int, *, sampling: Sampling, eos_ids: Collection[int]) -> Law:
        """The law of what this model alone generates."""
        how = self.width, self.sharpness
        cut = slice(self.vocab_size)
        return law_by(lambda new: sampling.probs(_logits(self.seed, (*prompt, *new), *how)[cut]), length, eos_ids)


def assert_same_law(law: dict[Output, float], expected: dict[Output, float], tolerance: float = 1e-12) -> None:
    """Every output has the same probability in both, and nothing else is possible."""
    assert math.isclose(sum(law.values()), 1.0, abs_tol=tolerance)
    for output in law.keys() | expected.keys():
        ours, theirs = law.get(output, 0.0), expected.get(output, 0.0)
        assert abs(ours - theirs) <= tolerance, f"{output}: {ours} against {theirs}"
