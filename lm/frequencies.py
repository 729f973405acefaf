"""Law 4.5 where a forward's rotary frequencies depend on its largest position: a text lies on one side of the switch.

Some models rotate *all* tokens of a forward by one set of frequencies up to `bound` tokens of text, and by another
beyond (`longrope`: Phi-3 and Phi-4 with 128k, PhiMoE, MiniCPM), chosen by the largest position of the forward. A
forward that spans the bound (a verification, a batch with a longer row, a whole response at once) would give other
distributions than one token at a time, so a text is on one side:

    near    no more than `bound` of its tokens are ever fed
    far     its prompt alone has more than `bound` tokens; in the loop one more, since a prompt may be fed without its
            last token

A text on both sides is refused.

With `dynamic` frequencies every length beyond the bound, there the model's context, has a set of its own: no text may
exceed it.
"""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from transformers import PretrainedConfig, PreTrainedModel

_KNOWN: "WeakKeyDictionary[PreTrainedModel, Frequencies | None]" = WeakKeyDictionary()


class Frequencies(NamedTuple):
    """How a model's frequencies change with the length of its text."""

    model: str
    """The name of its class."""
    rope_type: str
    bound: int
    """Tokens of text up to which the near frequencies hold."""

    def is_far(self, num_prompt: int) -> bool:
        """Whether a text with so long a prompt is read with the far frequencies from its first token on."""
        return "dynamic" not in self.rope_type and num_prompt > self.bound

    def crosses(self, num_prompt: int, num_fed: int) -> bool:
        """Whether a text of which `num_fed` tokens are fed in all, the first `num_prompt` at once, is on both sides."""
        return num_fed > self.bound and not self.is_far(num_prompt)

    def refusal(self, subject: str, remedy: str) -> ValueError:
        """The error for what crosses the bound: what it is, and what to do."""
        return ValueError(
            f"{subject}, and {self.model} changes the rotary frequencies of all tokens of a forward beyond "
            f"{self.bound} (rope_type {self.rope_type}): {remedy}"
        )


def frequencies_of(model: PreTrainedModel) -> Frequencies | None:
    """How the frequencies of `model` change; None where they do not.

    Raises:
        ValueError: layers that change at different lengths.
    """
    if model not in _KNOWN:
        bounds = dict(_bounds(model.config.get_text_config()))
        if len(bounds) > 1:
            lengths = " and ".join(map(str, sorted(bounds)))
            subject = f"{type(model).__name__} has layers that change their rotary frequencies at {lengths} tokens"
            raise ValueError(f"{subject}; choose another")
        found = [Frequencies(type(model).__name__, rope_type, bound) for bound, rope_type in bounds.items()]
        _KNOWN[model] = found[0] if found else None
    return _KNOWN[model]


def refuse_crossing(model: PreTrainedModel, num_prompt: int, num_fed: int, *, subject: str, remedy: str) -> None:
    """Raise ValueError where a text is on both sides of the model's bound.

    Args:
        model: the model that reads the text.
        num_prompt: tokens that `generate` would read in its first forward.
        num_fed: the most tokens that are read.
        subject: the clause that begins the refusal: what has so many tokens.
        remedy: the clause that ends the refusal: what to do.
    """
    frequencies = frequencies_of(model)
    if frequencies is not None and frequencies.crosses(num_prompt, num_fed):
        raise frequencies.refusal(subject, remedy)


def _bounds(config: PretrainedConfig) -> Iterator[tuple[int, str]]:
    """(bound, rope type) of every set of rotary parameters that has one: of the model, or of a type of its layers."""
    rope: Mapping[str, Any] = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested: Iterable[Any] = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in nested or [rope]:
        rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
        original = parameters.get(
            "original_max_position_embeddings", getattr(config, "original_max_position_embeddings", None)
        )
        # PhiMoE scales by another factor beyond the bound, with rotary parameters of any type
        if original is not None and (rope_type == "longrope" or "long_mscale" in parameters):
            yield int(original), "longrope"
        elif "dynamic" in rope_type:
            yield int(config.max_position_embeddings), rope_type
