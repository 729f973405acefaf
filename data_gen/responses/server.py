"""`source: server`: responses from an OpenAI-compatible completions server, many requests at once.

The client library retries with exponential back-off (refused connections, time-outs, 429, 5xx). If the server still
does not answer, or answers nearly every prompt wrongly, the run stops and keeps its whole shards; a wrong answer to one
prompt becomes that row's problem. Servers differ in how they are told `top_k`, and in whether they sample at all:
`server.kind` names the dialect.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from openai.types import Completion

from configs.schema import ServerConfig
from data_gen.responses.exchange import FinishReason, Problem, Progress, Request, Response
from data_gen.responses.hopeless import LatestRows
from data_gen.responses.spelling import Spelling
from lm import Sampling
from lm.uniforms import seed_of

_NUM_SEEDS = 2**31
"""Servers take seeds of 31 bits."""
_REMEDY = (
    "check data.server, data.template and what stands between here and the server, then run the same command again: it "
    "keeps the whole shards"
)


class CompletionsServer:
    """A server that has loaded the target."""

    def __init__(
        self, server: ServerConfig, spelling: Spelling, *, model: str, sampling: Sampling, max_new_tokens: int
    ) -> None:
        """Args:
        server: the address of the server, and how it is spoken to.
        spelling: the tokenizer of the pair, and the ids that end a response.
        model: the target's name on the server.
        sampling: the transform that the server is to sample with.
        max_new_tokens: the longest response.

        Raises:
            ValueError: a `Sampling` that this kind of server cannot be told.
        """
        self._latest = LatestRows()
        self.server, self.spelling, self.model = server, spelling, model
        self.settings = request_settings(
            server.kind, sampling, max_new_tokens=max_new_tokens, eos_ids=sorted(spelling.eos_ids)
        )
        self.settings["extra_body"] = self.settings.get("extra_body", {}) | server.extra
        self.client = openai.OpenAI(
            base_url=server.url,
            api_key=os.environ.get(server.api_key_variable, "none"),
            max_retries=server.max_retries,
            timeout=server.timeout_s,
        )

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request, `concurrency` of them in flight at once.

        Raises:
            ValueError: the server cannot be reached, refuses the key, does not know the model, or answers nearly every
                prompt wrongly.
        """

        def answer(request: Request) -> Response | Problem:
            result = self._answer(request, seed_of(seed, request.id) % _NUM_SEEDS)
            progress(1)
            return result

        answers, subject = [], f"answers of {self.server.url} are no responses"
        with ThreadPoolExecutor(self.server.concurrency) as pool:
            try:
                for result in pool.map(answer, requests):
                    answers.append(result)
                    problem = result if isinstance(result, Problem) else None
                    self._latest.add([problem], subject=subject, remedy=_REMEDY)
            except BaseException:  # also Ctrl-C: do not send the requests that still wait in the queue
                pool.shutdown(cancel_futures=True)
                raise
        return answers

    def _answer(self, request: Request, seed: int) -> Response | Problem:
        try:
            completion = self.client.completions.create(model=self.model, seed=seed, **self._settings_for(request))
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            return Problem(request.id, "error", f"refused: {error}")
        except openai.APIConnectionError as error:  # also time-outs
            raise ValueError(
                f"{self.server.url} does not answer after {self.server.max_retries} retries ({error}): start the "
                "server or raise data.server.timeout_s, then run the same command again: it keeps the whole shards"
            ) from error
        except openai.APIStatusError as error:
            raise ValueError(
                f"{self.server.url} answers {error.status_code} for model {self.model!r}: {error.message}"
            ) from error
        except (openai.APIError, json.JSONDecodeError) as error:
            return Problem(request.id, "error", f"garbage from the server: {getattr(error, 'doc', str(error))[:160]!r}")
        return self._read(completion, request)

    def _settings_for(self, request: Request) -> dict[str, Any]:
        """The request's body, in which the server reads exactly `prompt_ids`: as ids, or as text that it turns into
        them.

        Raises:
            ValueError: the server would add special tokens to the text that the template has written already, and
                cannot be told not to.
        """
        prompt_as = (
            self.server.prompt_as
            if self.server.prompt_as != "auto"
            else "token_ids"
            if self.server.kind == "vllm"
            else "text"
        )
        if prompt_as == "token_ids":
            return {"prompt": request.prompt_ids, **self.settings}
        if "add_special_tokens" in self.server.extra or self.spelling.ids_of(request.text) == request.prompt_ids:
            return {"prompt": request.text, **self.settings}
        if self.server.kind == "vllm":
            extra_body = {**self.settings["extra_body"], "add_special_tokens": False}
            return {"prompt": request.text, **self.settings, "extra_body": extra_body}
        raise ValueError(
            "data.template is chat, whose text has the special tokens of this tokenizer already, and a server of kind "
            f"{self.server.kind} adds them again; set "
            "data.server.prompt_as to token_ids, data.server.kind to vllm, or say it in data.server.extra"
        )

    def _read(self, completion: Completion, request: Request) -> Response | Problem:
        """The response in a completion, or why there is none."""
        choices = completion.choices if isinstance(completion, Completion) else None
        choice = choices[0] if isinstance(choices, list) and len(choices) == 1 else None
        if choice is None or not isinstance(choice.text, str) or choice.finish_reason not in ("stop", "length"):
            return Problem(
                request.id, "error", f"garbage from the server, expected one choice: {str(completion)[:160]!r}"
            )
        reason: FinishReason = choice.finish_reason
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is None:
            answer = self.spelling.of_text(choice.text, reason, request)
        elif isinstance(token_ids, list):
            answer = self.spelling.of_ids(token_ids, reason, request, text=choice.text)
        else:
            return Problem(request.id, "error", f"garbage from the server, token_ids are no list: {token_ids!r:.80}")
        most = self.settings["max_tokens"]
        if isinstance(answer, Response) and len(answer.response_ids) > most + (reason == "stop"):
            return Problem(
                request.id,
                "error",
                f"{len(answer.response_ids)} tokens from the server; it was asked for at most {most}",
            )
        return answer


def request_settings(kind: str, sampling: Sampling, *, max_new_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
    """The fields of a request that tell a kind of server the `Sampling`.

    openai: temperature and top_p only. vllm (and SGLang): also top_k, where -1 keeps every token, and that token ids
    are wanted back.
    transformers: a whole generation config, because its server decodes greedily or with top_k 50 unless told otherwise.

    Raises:
        ValueError: top_k for a server that takes none.
    """
    settings: dict[str, Any] = {
        "max_tokens": max_new_tokens,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p or 1.0,
    }
    if kind == "vllm":
        settings["extra_body"] = {"top_k": sampling.top_k or -1, "return_token_ids": True}
    elif kind == "transformers":
        generation: dict[str, Any] = {
            "do_sample": not sampling.is_greedy,
            "max_new_tokens": max_new_tokens,
            "eos_token_id": eos_ids,
        }
        if not sampling.is_greedy:
            generation |= {
                "temperature": sampling.temperature,
                "top_k": sampling.top_k or 0,
                "top_p": sampling.top_p or 1.0,
            }
        settings["extra_body"] = {"generation_config": json.dumps(generation)}
    elif sampling.top_k is not None:
        raise ValueError(
            f"sampling.top_k is {sampling.top_k} and an OpenAI server takes none; set data.server.kind to vllm or "
            "transformers"
        )
    return settings
