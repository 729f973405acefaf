"""`source: file`: existing responses, one JSON object per line.

    {"id": "81", "response": "text"}                    tokenized here, and ended with end-of-sequence unless
                                                        finish_reason is length
    {"id": "81", "turn": 2, "response_ids": [5, 9, 1]}  taken as they are; turns count from 1

A line may also have "finish_reason": "stop" | "length", and "prompt_ids", which must be the prompt ids of the run.
"""

import json
from collections.abc import Sequence
from typing import Any

from data_gen.prompts.prompt import json_lines, open_lines
from data_gen.responses.exchange import FinishReason, Problem, Progress, Request, Response
from data_gen.responses.spelling import Spelling


class ResponseFile:
    """Looks responses up by row id. Only the byte offset of each line stays in memory, so the file may be large."""

    def __init__(self, path: str, spelling: Spelling, *, max_new_tokens: int) -> None:
        """Check every line of the file.

        Raises:
            FileNotFoundError: no such file.
            ValueError: a malformed line (file and line number).
        """
        self.path, self.spelling, self.max_new_tokens = path, spelling, max_new_tokens
        offsets = _line_offsets(path)
        self._offsets = {self._name(record, number): offsets[number - 1] for number, record in json_lines(path)}

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """The file's response to each request; a `Problem` if it is missing, too long or malformed."""
        with open_lines(self.path) as file:
            answers: list[Response | Problem] = []
            for request in requests:
                offset = self._offsets.get(request.id)
                if offset is None:
                    answers.append(Problem(request.id, "error", f"no response in {self.path}"))
                else:
                    file.seek(offset)
                    answers.append(self._response(json.loads(file.readline()), request))
                progress(1)
        return answers

    def _response(self, record: dict[str, Any], request: Request) -> Response | Problem:
        if record.get("prompt_ids", request.prompt_ids) != request.prompt_ids:
            problem = f"{self.path} has other prompt_ids for this id; check data.prompts and data.template"
            return Problem(request.id, "error", problem)
        reason: FinishReason = record.get("finish_reason", "stop")
        if "response_ids" in record:
            ids = list(record["response_ids"])
            reason = record.get("finish_reason", "stop" if ids and ids[-1] in self.spelling.eos_ids else "length")
            answer = self.spelling.of_ids(ids, reason, request)
        else:
            answer = self.spelling.of_text(record["response"], reason, request)
        if isinstance(answer, Response) and len(answer.response_ids) > self.max_new_tokens:
            return Problem(
                request.id,
                "skipped",
                f"the response has {len(answer.response_ids)} tokens; data.max_new_tokens is {self.max_new_tokens}",
            )
        return answer

    def _name(self, record: dict[str, Any], number: int) -> str:
        where = f"{self.path}:{number}"
        if record.get("id") is None:
            raise ValueError(f"{where}: expected an id; got {sorted(record)}")
        if "prompt_ids" in record and not _are_ids(record["prompt_ids"]):
            raise ValueError(f"{where}: expected prompt_ids to be a list of integers, got {record['prompt_ids']!r:.80}")
        if not _are_ids(record.get("response_ids")) and not isinstance(record.get("response"), str):
            raise ValueError(
                f"{where}: expected response (a string) or response_ids (a list of integers); got {sorted(record)}"
            )
        if record.get("finish_reason", "stop") not in ("stop", "length"):
            raise ValueError(f"{where}: expected finish_reason to be stop or length, got {record['finish_reason']!r}")
        turn = record.get("turn", 1)
        if not isinstance(turn, int) or turn < 1:
            raise ValueError(f"{where}: expected turn to be a whole number from 1, got {turn!r}")
        return str(record["id"]) if turn == 1 else f"{record['id']}#{turn}"


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _line_offsets(path: str) -> list[int]:
    offsets, position = [], 0
    with open_lines(path) as file:
        for line in file:
            offsets.append(position)
            position += len(line)
    return offsets
