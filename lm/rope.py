"""Law 4.5 for models whose RoPE frequencies depend on the largest position of a forward.

Some models rotate *all* tokens of a forward by one set of frequencies up to `bound` tokens, and by another beyond
(`longrope`: Phi-3 and Phi-4 with 128k, PhiMoE, MiniCPM). A forward that crosses the bound would give other
distributions than one token at a time. So a text is either short or long:

    short    it has at most `bound` tokens
    long     its prompt has more than `bound` tokens; the loop counts the prompt without its last token, which may be
             fed in a later forward

A text that would become long while it grows is refused. With `dynamic` frequencies every length beyond the bound,
which is the model's context, has its own set of frequencies, so no text may exceed the bound.
"""

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:  # transformers takes long to import
    from transformers import PretrainedConfig, PreTrainedModel


class RopeSwitch(NamedTuple):
    """How the frequencies of a model, named by its class, change beyond `bound` tokens of its text; inf: never."""

    model: str
    rope_type: str = "default"
    bound: float = math.inf

    def is_long(self, num_prompt: int) -> bool:
        """True if a text with such a prompt is read with the long frequencies from its first token on."""
        return "dynamic" not in self.rope_type and num_prompt > self.bound

    def refusal(self, subject: str, remedy: str) -> ValueError:
        """The error for a text that crosses the bound."""
        return ValueError(
            f"{subject}, and {self.model} changes the rotary frequencies of all tokens of a forward beyond "
            f"{self.bound} (rope_type {self.rope_type}): {remedy}"
        )


def rope_switch_of(model: "PreTrainedModel") -> RopeSwitch:
    """How the frequencies of `model` change; ValueError if layers change at different lengths."""
    name = type(model).__name__
    bounds = dict(_bounds(model.config.get_text_config()))
    if len(bounds) > 1:
        raise ValueError(
            f"{name} has layers that change their rotary frequencies at {' and '.join(map(str, sorted(bounds)))} "
            "tokens; choose another model"
        )
    return next((RopeSwitch(name, rope_type, bound) for bound, rope_type in bounds.items()), RopeSwitch(name))


def refuse_crossing(model: "PreTrainedModel", num_prompt: int, num_fed: int, *, subject: str, remedy: str) -> bool:
    """Raise ValueError if a text of `num_fed` tokens, the first `num_prompt` fed at once, crosses the model's
    bound; else return whether it is long. The message begins with `subject`, which says what has so many tokens.
    """
    switch = rope_switch_of(model)
    is_long = switch.is_long(num_prompt)
    if num_fed > switch.bound and not is_long:
        raise switch.refusal(subject, remedy)
    return is_long


def _bounds(config: "PretrainedConfig") -> Iterator[tuple[int, str]]:
    """(bound, rope type) of each set of RoPE parameters that has a bound: the model's, or those of its layer types."""
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [value for value in rope.values() if isinstance(value, Mapping)]
    for parameters in nested or [rope]:
        rope_type = str(parameters.get("rope_type", parameters.get("type", "default")))
        name = "original_max_position_embeddings"
        original = parameters.get(name, getattr(config, name, None))
        # PhiMoE scales by another factor beyond the bound, with RoPE parameters of any type
        if original is not None and (rope_type == "longrope" or "long_mscale" in parameters):
            yield int(original), "longrope"
        elif "dynamic" in rope_type:
            yield int(config.max_position_embeddings), rope_type
