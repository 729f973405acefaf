"""Law 4.1: one transform from logits to probabilities, for data, traces and decoding alike.

    probs = softmax(top_p(top_k(logits / temperature)))        temperature > 0
    probs = one-hot(argmax logits)                             temperature = 0, the limit of the same path

The warpers are transformers' own, in the order in which `generate` applies them, so that a pair has the same
distribution here as there. Departures: temperature 0 is allowed (transformers raises), softmax runs in float32
whatever the dtype of the logits (float64 on request), and top-p sorts on the CPU only what it must (`QuickTopP`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import LongTensor, Tensor

if TYPE_CHECKING:  # transformers takes long to import, and a replay draws nothing
    from transformers import LogitsProcessor

Positions = Float[Tensor, "*position vocab"]
Rows = Float[Tensor, "rows vocab"]
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
REMEDY = "load it as float32 or bfloat16, or check its weights"  # the remedy for logits that are not finite
_NUM_LIKELIEST = 256  # tokens that hold top-p's mass in nearly every distribution of a language model
_MARGIN = 1e-5  # mass around top-p within which the rounding of another order of sums could decide otherwise


class QuickTopP:
    """transformers' top-p, bit for bit, from the 256 likeliest tokens if these decide it.

    Sorting 49,152 logits takes a core 4 ms, more than a small draft takes for a token; finding 256 takes 0.2 ms.
    A row is sorted if they hold too little mass, if the mass above one of them is within rounding of top-p, or if
    the last token kept and the first left out are equally likely.
    """

    def __init__(self, top_p: float) -> None:
        from transformers import TopPLogitsWarper

        self._exact = TopPLogitsWarper(top_p)

    def __call__(self, input_ids: LongTensor | None, scores: Rows) -> Rows:
        is_short = scores.shape[-1] <= 4 * _NUM_LIKELIEST
        if is_short or scores.device.type != "cpu":
            return self._exact(input_ids, scores)
        likeliest = scores.topk(_NUM_LIKELIEST, dim=-1).values
        probs = (likeliest - scores.logsumexp(-1, keepdim=True)).exp()
        above = probs.cumsum(-1, dtype=torch.float64) - probs
        num_kept = (above < self._exact.top_p).sum(-1, keepdim=True)
        indices = (num_kept + torch.tensor([-1, 0])).clamp(0, _NUM_LIKELIEST - 1)
        last, first_out = likeliest.gather(-1, indices).split(1, dim=-1)
        is_clear = ((above - self._exact.top_p).abs() > _MARGIN).all(-1) & (last > first_out).squeeze(-1)
        masked = scores.masked_fill(scores < last, self._exact.filter_value)
        if not is_clear.all():  # NaN is never clear
            masked[~is_clear] = self._exact(input_ids, scores[~is_clear])
        return masked


@dataclass(frozen=True)
class Sampling:
    """How logits become the probabilities that tokens are drawn from."""

    temperature: float | int = 1.0
    top_k: int | None = None
    top_p: float | int | None = None

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature is {self.temperature}; it must be at least 0 (0 is greedy)")
        if 0 < self.temperature < 1e-30:
            raise ValueError(
                f"temperature is {self.temperature}, and logits divided by less than 1e-30 exceed float32; set it to "
                "0, which is greedy"
            )
        if self.top_k is not None and (self.top_k < 1 or self.top_k != int(self.top_k)):
            raise ValueError(f"top_k is {self.top_k}; it must be a whole number from 1, or null to keep every token")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p is {self.top_p}; it must lie in (0, 1], or be null to keep every token")

    # each computed once, since the loop reads them at every token
    @cached_property
    def is_greedy(self) -> bool:
        """True when every distribution is one-hot."""
        return self.temperature == 0

    @cached_property
    def is_plain(self) -> bool:
        """True when the distribution is softmax(logits) itself."""
        return self.temperature == 1 and self.top_k is None and self.top_p in (None, 1) and self.sees_no_tokens

    @cached_property
    def sees_no_tokens(self) -> bool:
        """True unless `processed` is overridden and reads the tokens, each of which must then be on the host."""
        return type(self).processed is Sampling.processed

    @cached_property
    def _warpers(self) -> "list[LogitsProcessor | QuickTopP]":
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper

        warpers: list[LogitsProcessor | QuickTopP] = []
        if self.temperature not in (0.0, 1.0):
            warpers.append(TemperatureLogitsWarper(float(self.temperature)))
        if self.top_k is not None:
            warpers.append(TopKLogitsWarper(self.top_k))
        if self.top_p is not None and self.top_p < 1.0:
            warpers.append(QuickTopP(self.top_p))
        return warpers

    @classmethod
    def of(cls, processors: Sequence[object]) -> "Sampling | None":
        """The sampling equal to a list of transformers' processors; None if it has others than the three warpers."""
        from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

        names = {TemperatureLogitsWarper: "temperature", TopKLogitsWarper: "top_k", TopPLogitsWarper: "top_p"}
        kinds = [type(warper) for warper in processors]
        usual = ("filter_value", -torch.inf), ("min_tokens_to_keep", 1)
        is_plain = all(getattr(warper, name, value) == value for warper in processors for name, value in usual)
        if not is_plain or kinds != [kind for kind in names if kind in kinds]:
            return None
        return Sampling(**{names[type(warper)]: getattr(warper, names[type(warper)]) for warper in processors})

    @property
    def text(self) -> str:
        """The settings that are set, for example "temperature 0.7, top_p 0.9"."""
        return ", ".join(f"{name} {value}" for name, value in self.as_dict().items() if value is not None)

    def as_dict(self) -> dict[str, float | int | None]:
        """The three settings, for manifests and head configs."""
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p}

    def probs(self, logits: Positions, dtype: torch.dtype | None = None) -> Positions:
        """The distribution that tokens are drawn from, one row per position. -inf marks impossible tokens. `dtype` is
        of result and arithmetic, torch.float32 or torch.float64; None: float64 for float64 logits, else float32.
        """
        dtype = dtype or (torch.float64 if logits.dtype == torch.float64 else torch.float32)
        logits = logits if logits.dtype == dtype else logits.to(dtype)
        if self.is_greedy:
            return torch.zeros_like(logits).scatter_(-1, logits.argmax(-1, keepdim=True), 1.0)
        if self._warpers:
            rows = logits.reshape(-1, logits.shape[-1])
            for warper in self._warpers:  # the list's own call looks signatures up, each time
                rows = warper(None, rows)  # type: ignore[arg-type]  # no warper reads the ids
            logits = rows.reshape(logits.shape)
        return logits.softmax(-1)

    def processed(self, logits: Rows, token_ids: Sequence[int]) -> Rows:
        """Logits of the last rows of a sequence, as `probs` takes them; subclasses may read the tokens."""
        return logits

    def dists(self, logits: Rows, text: Sequence[int] = (), draft: Sequence[int] = ()) -> Rows:
        """Distributions that tokens are drawn from (`lm.draws`): `probs` of the processed logits of the last rows of a
        sequence, or at temperature 0 these logits. Its tokens, `text` and `draft`, are read unless `sees_no_tokens`.
        """
        if not self.sees_no_tokens:
            logits = self.processed(logits, [*text, *draft])
        return logits if self.is_greedy else self.probs(logits)


class NonFiniteError(ValueError):
    """A model yields logits that are not finite."""


def non_finite(values: Tensor) -> Bool[Tensor, "..."]:
    """True for rows of logits [..., vocab] with a NaN, a +inf, or nothing but -inf; some -inf are impossible tokens."""
    return ~values.amax(-1).isfinite()  # NaN if any entry is NaN, so one number per row tells all three cases


def refuse_non_finite(values: Tensor, whose: str, where: str) -> None:
    """Raise NonFiniteError if any row of logits [..., vocab] is `non_finite`; the message says `whose`, and `where`."""
    if non_finite(values).any():
        kind = "NaN" if values.amax(-1).isnan().any() else "infinite"
        raise NonFiniteError(f"{whose} yields {kind} logits {where}; {REMEDY}")
