"""`source: server`: responses from an OpenAI-compatible completions server, many requests at once.

The client library retries with exponential back-off (refused connections, time-outs, 429, 5xx). When a server stays away the run stops,
with whole shards kept; what it answers wrongly to one prompt becomes that row's problem. How a server is told `top_k`, and whether it
samples at all, differs: `server.kind` says which dialect it speaks.
"""

import json
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
from openai.types import Completion
from transformers import PreTrainedTokenizerBase

from configs.schema import Config
from data_gen.responses.exchange import FinishReason, Problem, Progress, Request, Response
from data_gen.responses.spelling import finished, response_of_text
from lm import Sampling
from lm.uniforms import seed_of

_SEEDS = 2**31
_ENOUGH = 8
"""A shard of at least so many prompts that are all refused means a wrong setting, not wrong prompts."""


class CompletionsServer:
    """A server that has loaded the target."""

    def __init__(self, config: Config, tokenizer: PreTrainedTokenizerBase, sampling: Sampling, eos_ids: frozenset[int]) -> None:
        """Args:
        config: for `data.server`, `data.max_new_tokens` and the target's name.
        tokenizer: of the pair.
        sampling: what the server is to sample with.
        eos_ids: ids that end a response.

        Raises:
            ValueError: a `Sampling` that this kind of server cannot be told.
        """
        self.server, self.max_new_tokens = config.data.server, config.data.max_new_tokens
        self.model = self.server.model or config.pair.target.path
        self.tokenizer, self.eos_ids = tokenizer, eos_ids
        self.settings = request_settings(self.server.kind, sampling, self.max_new_tokens, sorted(eos_ids))
        self.settings["extra_body"] = self.settings.get("extra_body", {}) | self.server.extra
        self.client = openai.OpenAI(
            base_url=self.server.url,
            api_key=os.environ.get(self.server.api_key_variable, "none"),
            max_retries=self.server.max_retries,
            timeout=self.server.timeout_s,
        )

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request, `concurrency` in flight.

        Raises:
            ValueError: the server cannot be reached, refuses the key, does not know the model, or refuses every prompt of the shard.
        """

        def answer(item: tuple[int, Request]) -> Response | Problem:
            result = self._answer(item[1], seed_of(seed, item[0]) % _SEEDS)
            progress(1)
            return result

        with ThreadPoolExecutor(self.server.concurrency) as pool:
            try:
                answers = list(pool.map(answer, enumerate(requests)))
            except BaseException:
                pool.shutdown(cancel_futures=True)
                raise
        refused = [problem for problem in answers if isinstance(problem, Problem) and problem.reason.startswith("refused: ")]
        if len(refused) == len(answers) >= _ENOUGH:
            raise ValueError(f"{self.server.url} refuses every prompt: {refused[0].reason}; check data.server and data.template")
        return answers

    def _answer(self, request: Request, seed: int) -> Response | Problem:
        prompt: Any = request.prompt_ids if self.server.prompt_as == "token_ids" else request.text
        try:
            completion = self.client.completions.create(model=self.model, prompt=prompt, seed=seed, **self.settings)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            return Problem(request.id, "error", f"refused: {error}")
        except openai.APIConnectionError as error:  # time-outs too
            raise ValueError(
                f"{self.server.url} does not answer after {self.server.max_retries} retries ({error}): start the server or raise "
                "data.server.timeout_s; whole shards are kept, the same command goes on"
            ) from error
        except openai.APIStatusError as error:
            raise ValueError(f"{self.server.url} answers {error.status_code} for model {self.model!r}: {error.message}") from error
        except (openai.APIError, json.JSONDecodeError) as error:
            return Problem(request.id, "error", f"garbage from the server: {error}")
        return self._read(completion, request)

    def _read(self, completion: Completion, request: Request) -> Response | Problem:
        """The response in a completion, or why there is none."""
        choice = completion.choices[0] if isinstance(completion, Completion) and completion.choices else None
        if choice is None or not isinstance(choice.text, str) or choice.finish_reason not in ("stop", "length"):
            return Problem(request.id, "error", f"garbage from the server: {str(completion)[:120]!r}")
        reason: FinishReason = choice.finish_reason
        token_ids = (choice.model_extra or {}).get("token_ids")
        if token_ids is not None:
            return finished(list(token_ids), reason, request, self.tokenizer, self.eos_ids)
        return response_of_text(choice.text, reason, request, self.tokenizer, self.eos_ids)


def request_settings(kind: str, sampling: Sampling, max_new_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
    """How a kind of server is told the `Sampling`.

    openai: temperature and top_p only. vllm (SGLang too): also top_k, -1 keeps every token. transformers: a whole generation config, for
    its server would otherwise decode greedily, or with top_k 50.
    """
    settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": sampling.temperature, "top_p": sampling.top_p or 1.0}
    if kind == "vllm":
        settings["extra_body"] = {"top_k": sampling.top_k or -1}
    elif kind == "transformers":
        generation: dict[str, Any] = {"do_sample": not sampling.is_greedy, "max_new_tokens": max_new_tokens, "eos_token_id": eos_ids}
        if not sampling.is_greedy:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": sampling.top_p or 1.0}
        settings["extra_body"] = {"generation_config": json.dumps(generation)}
    elif sampling.top_k is not None:
        raise ValueError(
            f"sampling.top_k is {sampling.top_k} and an OpenAI server takes none; set data.server.kind to vllm or transformers"
        )
    return settings
