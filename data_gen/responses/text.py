"""Responses from outside, as token ids, and `source: file`.

prompt ids + response ids must decode to prompt text + response text. A response that does not is a `Problem` and
never altered. (If the target wrote the same text with other ids, this cannot be detected; servers that return
ids avoid it.)

A file of responses has one JSON object per line:

    {"id": "81", "response": "text"}                    tokenized here, and ended with end-of-sequence unless
                                                        finish_reason is length
    {"id": "81", "turn": 2, "response_ids": [5, 9, 1]}  taken as they are; turns count from 1

A line may also have "finish_reason": "stop" | "length", and "prompt_ids", which must be the prompt ids of the run.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from transformers import PreTrainedTokenizerBase

from data_gen.prompts.files import Fields, json_lines
from data_gen.prompts.prompt import is_text, say_once
from data_gen.responses.exchange import Exchange, FinishReason, Problem, Progress, RefusedError, Request, ResponseSource
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

    def answer(
        self, request: Request, finish_reason: FinishReason, *, text: str | None = None, ids: Any = None
    ) -> Exchange:
        """The exchange with these response ids, or without them with ids that decode to `text`; ended with EOS
        if it stopped. RefusedError if they are invalid, or differ from `text`.
        """
        if ids is None:
            ids = self._ids_of(str(text), request)
        else:
            self._check(ids, text)
        if finish_reason == "stop" and self.eos_ids and not (ids and ids[-1] in self.eos_ids):
            eos_id = self.tokenizer.eos_token_id
            ids = [*ids, eos_id if eos_id in self.eos_ids else min(self.eos_ids)]
        if not ids:
            raise RefusedError("empty response")
        for position, token in enumerate(ids[:-1]):
            if token in self.eos_ids:
                raise RefusedError(f"end-of-sequence id at position {position} of a response of {len(ids)} tokens")
        return Exchange(*request, ids, finish_reason)

    def _check(self, ids: Any, text: str | None) -> None:
        is_list = isinstance(ids, list)
        for token in ids if is_list else [ids]:
            if not is_list or type(token) is not int or not 0 <= token < self.num_ids:
                raise RefusedError(f"response id {token!r:.40} is not one of the tokenizer's {self.num_ids}")
        if text is not None:  # compared without spaces and incomplete characters
            spelled = self.tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
            if _solid(str(spelled)) != _solid(text):
                raise RefusedError(f"the response's text differs from its decoded token ids: {text[:60]!r}")

    def _ids_of(self, text: str, request: Request) -> list[int]:
        if not is_text(text):
            raise RefusedError("the response has a lone surrogate (half of a character)")
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
                return ids
        raise RefusedError(f"the response does not round-trip through the tokenizer: {text[:60]!r}")

    def _decode(self, ids: list[int]) -> str:
        return str(self.tokenizer.decode(ids, skip_special_tokens=False, clean_up_tokenization_spaces=False))


class ResponseFile:
    """Looks responses up by row id; the records of the file stay in memory, as text."""

    def __init__(
        self,
        path: str,
        spelling: Spelling,
        *,
        max_new_tokens: int,
        make_generator: Callable[[], ResponseSource] | None = None,
    ) -> None:
        """Check every line of the file; ValueError for a malformed one, or two responses to one prompt, with
        file and line number. `make_generator` returns the source of responses that the file lacks; None: they
        are errors.
        """
        self.path = path
        self.spelling = spelling
        self.max_new_tokens = max_new_tokens
        self._make_generator = make_generator
        self._records: dict[str, dict[str, tuple[str, str]]] = {}
        """Row id -> prompt ids, if the line has them -> the location and the text of the line."""
        for where, record in json_lines(path):
            name = _row_name(record, where)
            text = json.dumps(record, sort_keys=True)
            of_row = self._records.setdefault(name, {})
            first_where, first_text = of_row.setdefault(str(record.get("prompt_ids")), (where, text))
            if first_text != text:
                raise ValueError(f"{where}: {first_where} has another response to the same prompt {name!r}; remove one")

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """The file's response to each request, or a generated one; a `Problem` if it is missing or invalid."""
        answers: list[Exchange | Problem] = []
        lacking = [request for request in requests if request.id not in self._records]
        generated: dict[str, Exchange | Problem] = {}
        if lacking and self._make_generator is not None:
            say_once(f"{self.path} lacks responses to some prompts; the target generates them")
            generated = {answer.id: answer for answer in self._make_generator().respond(lacking, seed, progress)}
        for request in requests:
            if request.id in generated:
                answers.append(generated[request.id])
                continue
            try:
                answers.append(self._answer(request))
            except RefusedError as error:
                answers.append(Problem(request.id, "error", str(error)))
            progress(1)
        return answers

    def _answer(self, request: Request) -> Exchange | Problem:
        if request.id not in self._records:
            raise RefusedError(
                f"no response in {self.path}; add it, or let the target generate it (data.labels: target)"
            )
        records = [json.loads(text) for _, text in self._records[request.id].values()]
        # prompts of two splits or sets may have the same id
        records = [one for one in records if one.get("prompt_ids", request.prompt_ids) == request.prompt_ids]
        if not records:
            raise RefusedError(f"{self.path} has other prompt_ids for this id; check data.prompts and data.template")
        if len(records) > 1:
            raise RefusedError(f"{self.path} has two responses to this prompt, with and without prompt_ids; remove one")
        record = records[0]
        ids = record.get("response_ids")
        has_stopped = ids is None or not self.spelling.eos_ids.isdisjoint(ids[-1:])
        reason = record.get("finish_reason", "stop" if has_stopped else "length")
        answer = self.spelling.answer(request, reason, ids=ids, text=record["response"] if ids is None else None)
        if (num := len(answer.response_ids)) > self.max_new_tokens:
            return Problem(
                request.id, "skipped", f"the response has {num} tokens; data.max_new_tokens is {self.max_new_tokens}"
            )
        return answer


def _row_name(record: Fields, where: str) -> str:
    """The id of the row that a line answers; ValueError for a malformed line."""
    turn = record.get("turn", 1)
    prompt_ids = record.get("prompt_ids", [])
    reason = record.get("finish_reason", "stop")
    ids = record.get("response_ids")
    has_response = isinstance(record.get("response"), str) if ids is None else _are_ids(ids)
    checks = (
        (record.get("id") is not None, f"an id; got {sorted(record)}"),
        (_are_ids(prompt_ids), f"prompt_ids to be a list of integers, got {prompt_ids!r:.80}"),
        (has_response, f"response (a string) or response_ids (a list of integers); got {sorted(record)}"),
        (reason in ("stop", "length"), f"finish_reason to be stop or length, got {reason!r}"),
        (isinstance(turn, int) and turn >= 1, f"turn to be a whole number from 1, got {turn!r}"),
    )
    for is_right, expected in checks:
        if not is_right:
            raise ValueError(f"{where}: expected {expected}")
    return str(record["id"]) if turn == 1 else f"{record['id']}#{turn}"


def _are_ids(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _solid(text: str) -> str:
    return "".join(text.replace("\ufffd", "").split())
