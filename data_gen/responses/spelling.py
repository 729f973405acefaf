"""Turns responses from outside into token ids.

prompt ids + response ids must decode to prompt text + response text. A response that does not is a `Problem` and never
altered. (If the target wrote the same text with other ids, this cannot be detected; servers that return ids avoid it.)
"""

from dataclasses import dataclass
from functools import cached_property

from transformers import PreTrainedTokenizerBase

from data_gen.prompts.prompt import is_text
from data_gen.responses.exchange import FinishReason, Problem, Request, Response
from lm import vocab_size_of


@dataclass(frozen=True)
class Spelling:
    """The ids of responses, under one tokenizer."""

    tokenizer: PreTrainedTokenizerBase
    eos_ids: frozenset[int]
    """Ids that end a response."""

    @cached_property
    def num_ids(self) -> int:
        """One more than the tokenizer's largest id; cached, since a large vocabulary takes a tenth of a second."""
        return vocab_size_of(self.tokenizer)

    def of_text(self, text: str, finish_reason: FinishReason, request: Request) -> Response | Problem:
        """The response with this text; a `Problem` if no ids decode to it."""
        if not is_text(text):
            return Problem(request.id, "error", "the response has a lone surrogate (half of a character)")
        alone, prompt, joint = (
            list(self.tokenizer(part, add_special_tokens=False)["input_ids"])
            for part in (text, request.text, request.text + text)
        )
        # Some tokenizers mark the start of a text (a space before the first word), so the response alone does not
        # continue the prompt. The ids of prompt and response together do, unless a token spans the border.
        candidates = [alone] + ([joint[len(prompt) :]] if joint[: len(prompt)] == prompt else [])
        expected = self._decode(request.prompt_ids) + text
        for ids in candidates:
            if self._decode(request.prompt_ids + ids) == expected:
                return self.of_ids(ids, finish_reason, request)
        return Problem(request.id, "error", f"the response does not round-trip through the tokenizer: {text[:60]!r}")

    def of_ids(
        self, ids: list[int], finish_reason: FinishReason, request: Request, *, text: str | None = None
    ) -> Response | Problem:
        """The response with these ids, ended with an end-of-sequence id if it stopped; a `Problem` for invalid ids.

        Args:
            ids: the received ids.
            finish_reason: the received reason.
            request: the request that the ids answer.
            text: the text received with the ids, if any.
        """
        wrong = next((token for token in ids if type(token) is not int or not 0 <= token < self.num_ids), None)
        if wrong is not None:
            return Problem(
                request.id, "error", f"response id {wrong!r:.40} is not one of the tokenizer's {self.num_ids}"
            )
        if text is not None and not self._decodes_to(ids, text):
            return Problem(
                request.id, "error", f"the response's text differs from its decoded token ids: {text[:60]!r}"
            )
        if finish_reason == "stop" and self.eos_ids and not (ids and ids[-1] in self.eos_ids):
            eos_id = self.tokenizer.eos_token_id
            ids = [*ids, eos_id if eos_id in self.eos_ids else min(self.eos_ids)]
        if not ids:
            return Problem(request.id, "error", "empty response")
        early = next((position for position, token in enumerate(ids[:-1]) if token in self.eos_ids), None)
        if early is not None:
            return Problem(
                request.id, "error", f"end-of-sequence id at position {early} of a response of {len(ids)} tokens"
            )
        return Response(ids, finish_reason)

    def ids_of(self, text: str) -> list[int]:
        """A text's ids with the special tokens that the tokenizer adds, as a server reads it by default."""
        return list(self.tokenizer(text)["input_ids"])

    def _decodes_to(self, ids: list[int], text: str) -> bool:
        """Whether ids decode to a text, apart from spaces and incomplete characters."""
        spelled = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return _solid(str(spelled)) == _solid(text)

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _solid(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())
