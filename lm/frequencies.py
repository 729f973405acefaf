"""Law 4.5 where a forward's rotary frequencies depend on its largest position: which models do that, and what may share
a forward.

Some models rotate *all* tokens of a forward by one set of frequencies up to `bound` tokens of text, and by another
beyond (`longrope`: Phi-3 and Phi-4 with 128k, PhiMoE, MiniCPM), chosen by the largest position of the forward. So a
forward that spans the bound (a verification, a batch with a longer row, a whole response at once) gives other laws than
one token at a time. The reference is plain `generate`:

    near    the forward that reads a token before the bound, and all before it, uses the near frequencies
    far     one that reads a token at the bound or beyond uses the far ones. What was cached before keeps the near ones,
            unless the model reads its whole text again there (`reads_again`: Phi-3, PhiMoE, Phi-4-multimodal)
    prompt  the prompt is one forward: one that ends beyond the bound is far as a whole

Worked example: bound 16, a text of 14 tokens whose last row is asked with 4 drafted tokens after it. Rows 13, 14, 15
are near: tokens up to 16 are fed. Rows 16, 17 are far: then the rest is fed, or all 18 tokens anew by a model that
reads again.

With `dynamic` frequencies every length beyond the bound, there the model's context, has a set of its own: no text may
go beyond.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import torch
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel

_KNOWN: "WeakKeyDictionary[PreTrainedModel, Frequencies | None]" = WeakKeyDictionary()


class Frequencies(NamedTuple):
    """How a model's frequencies change with the length of its text."""

    model: str
    """The name of its class."""
    rope_type: str
    bound: int
    """Tokens of text up to which the near frequencies hold."""
    reads_again: bool
    """`generate` gives up the cache at the bound and reads the whole text with the far frequencies."""

    @property
    def is_dynamic(self) -> bool:
        """Every length beyond the bound has frequencies of its own."""
        return "dynamic" in self.rope_type

    def crosses(self, num_prompt: int, num_fed: int) -> bool:
        """Would a text of which `num_fed` tokens are fed at last, the first `num_prompt` at once, be read with several
        frequencies?
        """
        return num_fed > self.bound and (self.is_dynamic or num_prompt <= self.bound)

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
        found = [
            Frequencies(type(model).__name__, rope_type, bound, rope_type == "longrope" and _reads_again(model, bound))
            for bound, rope_type in bounds.items()
        ]
        _KNOWN[model] = found[0] if found else None
    return _KNOWN[model]


def refuse_crossing(model: PreTrainedModel, num_prompt: int, num_fed: int, *, subject: str, remedy: str) -> None:
    """Raise ValueError where a text is read with several frequencies, for those who read several of its tokens at once.

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


def _reads_again(model: PreTrainedModel, bound: int) -> bool:
    """Does `generate` drop a cache of `bound` tokens before it feeds the next? The model's inputs for it tell."""
    cache = DynamicCache()
    cache.update(torch.zeros(1, 1, bound, 1), torch.zeros(1, 1, bound, 1), 0)
    ids = torch.zeros(1, bound + 1, dtype=torch.long)
    prepare: Any = model.prepare_inputs_for_generation  # mypy takes it for a part of the model
    prepared = prepare(ids, past_key_values=cache, next_sequence_length=1, use_cache=True)
    return prepared["input_ids"].shape[1] > 1


class Feed(NamedTuple):
    """One forward of a text, all with the same frequencies."""

    end: int
    """Length of the text that is cached after it."""
    num_rows: int
    """How many of its last rows are asked for; perhaps none."""
    is_far: bool


@dataclass
class Keys:
    """The frequencies of the keys that are cached of one text."""

    frequencies: Frequencies
    num_prompt: int | None = None
    """Tokens of the text's first forward, drafted ones not counted; None before it."""
    is_far: bool = False
    """All keys have the far frequencies, in a model that reads again."""

    def feeds(self, num_held: int, end: int, num_rows: int) -> list[Feed]:
        """The forwards that give the last `num_rows` rows of a text of `end` tokens, of which `num_held` are cached.

        Raises:
            ValueError: dynamic frequencies, and a text beyond the bound.
        """
        bound, first = self.frequencies.bound, end - num_rows
        if self.num_prompt is None:
            self.num_prompt = first + 1
        if end <= bound:
            return [Feed(end, num_rows, is_far=False)]
        if self.frequencies.is_dynamic:
            raise self.frequencies.refusal(f"the text has {end} tokens", "shorten the prompt, or lower max_new_tokens")
        has_near = first < bound if self.frequencies.reads_again else num_held < bound and self.num_prompt <= bound
        num_near = max(0, bound - first) if has_near else 0
        return [Feed(bound, num_near, is_far=False)] * has_near + [Feed(end, num_rows - num_near, is_far=True)]

    def is_other(self, feed: Feed) -> bool:
        """Do the cached keys have other frequencies than `feed` needs?"""
        return self.frequencies.reads_again and feed.is_far != self.is_far

    def begin(self, feed: Feed) -> bool:
        """Note that `feed` comes next: True where the cache is to be emptied for it."""
        is_other = self.is_other(feed)
        self.is_far = self.is_far != is_other
        return is_other

    def begin_at_once(self, num_text: int, deepest: int) -> bool:
        """`begin` for a tree of drafts, whose tokens share one forward with those of the text that are fed with it.

        Args:
            num_text: tokens of the text, the last of which may be fed with the tree.
            deepest: tokens of the text and of the tree's longest path.

        Raises:
            ValueError: they are on both sides of the bound.
        """
        self.num_prompt = self.num_prompt or num_text
        if self.frequencies.crosses(num_text - 1, deepest):
            raise self.frequencies.refusal(
                f"a text of {num_text} tokens has a tree of drafts up to {deepest}", "draft chains"
            )
        return self.begin(Feed(deepest, 0, is_far=deepest > self.frequencies.bound))

    def reads_again(self, start: int, end: int) -> bool:
        """Is what is cached of a text of `start` tokens given up before it has `end`?"""
        return self.frequencies.reads_again and start <= self.frequencies.bound < end


def keys_of(model: PreTrainedModel) -> Keys | None:
    """The keys of an empty text; None where frequencies do not change."""
    frequencies = frequencies_of(model)
    return None if frequencies is None else Keys(frequencies)
