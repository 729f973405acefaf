"""A head's inputs beside the hidden state: scalars (`lm.signals`), then the token's embedding.

A prefix head scores a token before it is drawn (law 4.8c), so it has no input that depends on the token.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from lm.signals import SCALARS

STANDARD = ("log_token_prob", "entropy", "logit_token_prob")
"""Meaning of `scalars: true` in a config, for heads that score a known token."""
STANDARD_OF_PREFIX = ("entropy", "logit_max_prob")
"""Meaning of `scalars: true` in a config, for prefix heads."""
EARLIER_STANDARD = ("log_token_prob", "entropy")
"""Meaning of `scalars: true` in a config.json, as versions up to 0.2.0 wrote it; newer ones list names."""
_STANDARDS = (STANDARD, STANDARD_OF_PREFIX, EARLIER_STANDARD)
"""Sets that a head's name abbreviates to +s, longest first."""

SIGNALS = {
    "fed": "logit_token_prob",
    "drawn": "logit_token_prob",
    "prefix": "logit_max_prob",
    "candidate": "logit_token_prob",
}
"""Timing of a head -> the scalar that predicts its label without training; the head must predict it better."""

EPSILON = 1e-5
"""Added to the variance that normalisation divides by."""


class Inputs(NamedTuple):
    """The inputs of one head, in the order of its weights' columns."""

    scalars: tuple[str, ...] = ()
    embedding: bool = False
    is_normalised: bool = False
    """Hidden state and embedding are each normalised first."""

    @classmethod
    def of(
        cls, scalars: bool | Sequence[str], embedding: bool, timing: str = "drawn", is_normalised: bool = False
    ) -> "Inputs":
        """The inputs that a config names; ValueError for an unknown or repeated scalar."""
        if isinstance(scalars, bool):
            standard = STANDARD_OF_PREFIX if timing == "prefix" else STANDARD
            scalars = standard if scalars else ()
        if not set(scalars) <= SCALARS.keys() or len(set(scalars)) < len(scalars):
            raise ValueError(
                f"scalars are {list(scalars)}; use true, false, or some of {', '.join(SCALARS)}, each once"
            )
        return cls(tuple(scalars), bool(embedding), bool(is_normalised))

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> "Inputs":
        """The inputs that a config.json names; errors as `of` has them."""
        scalars = config.get("scalars", False)
        timing = config.get("timing", "fed")
        if scalars is True:
            scalars = [name for name in EARLIER_STANDARD if timing != "prefix" or not SCALARS[name].reads_token]
        return cls.of(scalars, config.get("embedding", False), timing, config.get("is_normalised", False))

    @property
    def reads_token(self) -> bool:
        """Whether any input depends on the token that is scored."""
        return self.embedding or any(SCALARS[name].reads_token for name in self.scalars)

    def width(self, hidden_size: int) -> int:
        """Number of columns beside the hidden state."""
        return len(self.scalars) + hidden_size * self.embedding

    @property
    def label(self) -> str:
        """+s for standard scalars, others by name, +e for the embedding, +n if normalised."""
        names = self.scalars
        for standard in _STANDARDS:
            if names[: len(standard)] == standard:
                names = ("s", *names[len(standard) :])
        if self.embedding:
            names = (*names, "e")
        if self.is_normalised:
            names = (*names, "n")
        return "".join(f"+{name}" for name in names)

    @property
    def config(self) -> dict[str, bool | list[str]]:
        """The keys of config.json."""
        named: dict[tuple[str, ...], bool] = {(): False, EARLIER_STANDARD: True}
        return self._asdict() | {"scalars": named.get(self.scalars, list(self.scalars))}

    def taken(self, states: Float[Tensor, "*tokens hidden"]) -> Float[Tensor, "*tokens hidden"]:
        """Hidden states or embeddings; if the head normalises them, after a LayerNorm without weights."""
        return functional.layer_norm(states, states.shape[-1:], eps=EPSILON) if self.is_normalised else states

    def stacked(self, columns: Mapping[str, Float[Tensor, "*tokens"]]) -> Float[Tensor, "*tokens scalar"] | None:
        """The argument `scalars` of a head's forward for some tokens, from scalars by name, in nats."""
        return torch.stack([columns[name] for name in self.scalars], -1) if self.scalars else None

    def read(
        self,
        hidden: Float[Tensor, "*tokens hidden"],
        scalars: Float[Tensor, "*tokens scalar"] | None,
        embedding: Float[Tensor, "*tokens hidden"] | None,
    ) -> tuple[Float[Tensor, "*tokens hidden"], Float[Tensor, "*tokens input"] | None]:
        """hidden and x of law 4.7, all other inputs side by side, or None; ValueError for an input that is missing or
        is not read.
        """
        for name, value, is_read in (("scalars", scalars, self.scalars), ("embedding", embedding, self.embedding)):
            if value is None and is_read:
                raise ValueError(f"the head needs {name}; pass it")
            if value is not None and not is_read:
                raise ValueError(f"the head takes no {name}; leave it out")
        others = [] if scalars is None else [scalars]
        if embedding is not None:
            others.append(self.taken(embedding))
        return self.taken(hidden), torch.cat(others, -1) if others else None
