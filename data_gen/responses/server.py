"""`source: server` and `labels: server`: responses from OpenAI-compatible completions servers, many requests at once,
and the target's distributions from their log-probabilities (`data_gen.responses.top_logprobs`).

The client library retries with exponential back-off (refused connections, time-outs, 429, 5xx). If no server answers,
or nearly every answer is invalid, the run stops and keeps its finished shards; one invalid answer becomes that row's
problem. Servers differ in how they take `top_k`, and in whether they sample at all: `server.kind` names the dialect.

The distributions along an existing response come from `prompt_logprobs` of prompt + X_<n, and the last one from the
token that the server generates after it: one forward, as in this process.
"""

import asyncio
import json
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from configs.schema import ServerConfig
from data_gen.responses.dispatch import Servers
from data_gen.responses.exchange import (
    Answers,
    Distributions,
    Exchange,
    LatestRows,
    Problem,
    Progress,
    RefusedError,
    Request,
    ResponseSource,
    ShardSpec,
    ask,
    in_order,
)
from data_gen.responses.text import Spelling
from data_gen.responses.top_logprobs import DistributionReader
from lm import Sampling
from lm.draws import seed_of

_NUM_SEEDS = 2**31
"""Servers accept seeds of 31 bits."""
_NUM_IDS = 2**31
_REMEDY = (
    "check data.server, data.template and any proxy in between, then run the same command again, which keeps the "
    "finished shards"
)
_UNPENALISED = {"min_p": 0.0, "repetition_penalty": 1.0}
"""Overrides the model's generation config in vLLM and SGLang, as `Sampling` has no such settings."""
_PREFIX = "token_id:"
"""How vLLM writes token ids where OpenAI has their texts."""
_INVALID = "invalid answer from the server"
_Positions = list[dict[int, float]]
"""{token id: log-probability} at each position."""


class CompletionsServer:
    """Servers that have loaded the target."""

    def __init__(
        self,
        server: ServerConfig,
        spelling: Spelling,
        *,
        model: str,
        sampling: Sampling,
        max_new_tokens: int,
        reader: DistributionReader | None = None,
    ) -> None:
        """Check the sampling, and that several servers answer, with distributions if there is a `reader`."""
        self._latest = LatestRows()
        self.server, self.spelling, self.reader = server, spelling, reader
        self.settings = request_settings(
            server.kind, sampling, max_new_tokens=max_new_tokens, eos_ids=sorted(spelling.eos_ids)
        )
        extra_body = self.settings.get("extra_body", {})
        if reader is not None:
            self.settings["logprobs"] = reader.num_logprobs
            extra_body |= {"return_tokens_as_token_ids": True}
        self.settings["extra_body"] = extra_body | server.extra
        self.servers = Servers(server, model=model)
        if reader is not None or len(server.urls) > 1:
            self._try_each()

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Exchange | Problem]:
        """One answer per request; ValueError if no server answers, or nearly all answers are invalid."""

        async def answer(request: Request) -> Exchange:
            body = self._body(request) | {"seed": seed_of(seed, request.id) % _NUM_SEEDS}
            try:
                return self._read(await self.servers.ask(body), request)
            finally:
                progress(1)

        return self._all(requests, answer)

    def with_distributions(self, exchanges: Sequence[Exchange]) -> list[Exchange | Problem]:
        """Existing responses with the target's distributions at their positions, from one forward over everything
        before the last token; ValueError as `respond`.
        """
        assert self.reader is not None
        num = self.reader.num_logprobs
        extra_body = self.settings["extra_body"] | {"top_k": -1, "prompt_logprobs": num}
        settings = {"max_tokens": 1, "temperature": 1.0, "logprobs": num, "seed": 0, "extra_body": extra_body}

        async def read(exchange: Exchange) -> Exchange:
            before = [*exchange.prompt_ids, *exchange.response_ids[:-1]]
            choice = _choice(await self.servers.ask({"prompt": before, **settings}))
            positions = _positions(choice, of_prompt=True)[len(exchange.prompt_ids) :] + _positions(choice)
            tokens = [*exchange.response_ids[:-1], None]  # the server has not seen the last one
            return exchange._replace(distributions=self._distributions(positions, tokens))

        return self._all(exchanges, read)

    def ask(self, spec: ShardSpec, source: ResponseSource, **settings: Any) -> Answers:
        """The answers of `source`, these servers or a file, with the target's distributions if there is a reader."""
        answers = ask(spec, source, **settings)
        if self.reader is None:
            return answers
        without = [exchange for exchange in answers.exchanges if exchange.distributions is None]
        return in_order(spec, [*answers.exchanges, *answers.problems, *self.with_distributions(without)])

    def _all(
        self, rows: Sequence[Any], work: Callable[[Any], Coroutine[Any, Any, Exchange]]
    ) -> list[Exchange | Problem]:
        """The results of `work` in the order of the rows; what the servers refuse is a problem, and nearly only
        problems end the run.
        """
        subject = f"answers of {', '.join(self.server.urls)} are invalid"

        async def result_of(row: Any) -> Exchange | Problem:
            result: Exchange | Problem
            try:
                result = await work(row)
            except RefusedError as error:
                result = Problem(row.id, "error", str(error))
            problem = result if isinstance(result, Problem) else None
            self._latest.add([problem], subject=subject, remedy=_REMEDY)
            return result

        async def results() -> list[Exchange | Problem]:
            return await asyncio.gather(*map(result_of, rows))

        return self.servers.run(results())

    def _try_each(self) -> None:
        first = Request("", "one", self.spelling.tokenizer("one")["input_ids"])
        body = self._body(first) | {"seed": 0, "max_tokens": 1}
        for url in self.server.urls:
            hint = "" if self.reader is None else f"; start the server with --max-logprobs {self.reader.num_logprobs}"
            try:
                answer = self.servers.run(self.servers.ask_at(url, body))
                hint = ""
                if self.reader is not None:
                    self._check_raw(url, body, _positions(_choice(answer)))
            except RefusedError as error:
                raise ValueError(f"{url} failed at its first request: {error}{hint}") from error

    def _check_raw(self, url: str, body: Mapping[str, Any], positions: _Positions) -> None:
        """RefusedError unless the server's log-probabilities give a distribution, whatever the temperature."""
        plain = {"temperature": 1.0, "top_p": 1.0, "extra_body": body["extra_body"] | {"top_k": -1}}
        plain_positions = _positions(_choice(self.servers.run(self.servers.ask_at(url, {**body, **plain}))))
        for first_position in (positions, plain_positions):
            self._distributions(first_position, [None])
        temperature = body["temperature"]
        spread, spread_at_1 = (max(p[0].values()) - min(p[0].values()) for p in (positions, plain_positions))
        if temperature not in (0, 1) and abs(spread - spread_at_1) > abs(spread - spread_at_1 / temperature):
            raise RefusedError(
                "its log-probabilities depend on the temperature; start the server with --logprobs-mode raw_logprobs, "
                "or set data.labels: target"
            )

    def _distributions(
        self, positions: _Positions, tokens: Sequence[int | None], *, are_drawn: bool = False
    ) -> Distributions:
        """The distributions at the positions of these tokens; None: a token that the server has not seen. `are_drawn`:
        the server drew the tokens, so none may have probability 0.
        """
        assert self.reader is not None
        if len(positions) != len(tokens):
            raise RefusedError(f"the server returned log-probabilities at {len(positions)} of {len(tokens)} positions")
        for number, (logprobs, token) in enumerate(zip(positions, tokens, strict=True)):
            for name in (min(logprobs, default=0), max(logprobs, default=0)):
                if not 0 <= name < _NUM_IDS:
                    raise RefusedError(f"{_INVALID}: log-probability of token id {name} at position {number}")
            if token is not None and token not in logprobs:
                raise RefusedError(
                    f"the server's log-probabilities at position {number} lack token {token} of the response: they "
                    "belong to another position or another response"
                )
        drawn = [token for token in tokens if token is not None] if are_drawn else None
        return self.reader.distributions(positions, drawn)

    def _body(self, request: Request) -> dict[str, Any]:
        """The request's body, from which the server reads exactly `prompt_ids`."""
        is_vllm, prompt_as = self.server.kind == "vllm", self.server.prompt_as
        if prompt_as == "token_ids" or (prompt_as == "auto" and is_vllm):
            return {"prompt": request.prompt_ids, **self.settings}
        body = {"prompt": request.text, **self.settings}
        read_ids = self.spelling.tokenizer(request.text)["input_ids"]  # with the special tokens that it adds
        if "add_special_tokens" in self.server.extra or read_ids == request.prompt_ids:
            return body
        if is_vllm:
            return body | {"extra_body": {**self.settings["extra_body"], "add_special_tokens": False}}
        raise ValueError(
            "data.template is chat, whose text already has this tokenizer's special tokens, but a server of kind "
            f"{self.server.kind} adds them again; set data.server.prompt_as to token_ids, data.server.kind to vllm, or "
            "add_special_tokens in data.server.extra"
        )

    def _read(self, completion: Any, request: Request) -> Exchange:
        choice = _choice(completion)
        text, reason = choice.get("text"), choice.get("finish_reason")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise RefusedError(f"{_INVALID}, expected one choice: {str(completion)[:160]!r}")
        answer = self.spelling.answer(request, reason, text=text, ids=choice.get("token_ids"))
        limit, ids = self.settings["max_tokens"], answer.response_ids
        if len(ids) > limit + (reason == "stop"):
            raise RefusedError(f"the server returned {len(ids)} tokens, more than the requested {limit}")
        if self.reader is None:
            return answer
        return answer._replace(distributions=self._distributions(_positions(choice), ids, are_drawn=True))


def _choice(completion: Any) -> dict[str, Any]:
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RefusedError(f"{_INVALID}, expected one choice: {str(completion)[:160]!r}")
    return choices[0]


def _positions(choice: Mapping[str, Any], *, of_prompt: bool = False) -> _Positions:
    """Log-probabilities by token id at each generated position, or at each of the prompt."""
    try:
        if of_prompt:
            return [
                {int(name): float(entry["logprob"]) for name, entry in (logprobs or {}).items()}
                for logprobs in choice["prompt_logprobs"]
            ]
        return [
            {int(name.split(_PREFIX)[1]): float(value) for name, value in logprobs.items()}
            for logprobs in choice["logprobs"]["top_logprobs"]
        ]
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        given = choice.get("prompt_logprobs" if of_prompt else "logprobs")
        raise RefusedError(
            "data.labels: server needs log-probabilities by token id, as vLLM returns them, but the server returned "
            f"{str(given)[:80]!r}; set data.labels: target"
        ) from error


def request_settings(kind: str, sampling: Sampling, *, max_new_tokens: int, eos_ids: list[int]) -> dict[str, Any]:
    """The sampling fields of a request to a kind of server.

    openai: temperature and top_p only. vllm (and SGLang): also top_k (-1 keeps every token) and a request for token
    ids. transformers: a whole generation config, because its server decodes greedily or with top_k 50 by default.

    Raises:
        ValueError: top_k for a server that does not support it.
    """
    top_p = sampling.top_p or 1.0
    settings: dict[str, Any] = {"max_tokens": max_new_tokens, "temperature": sampling.temperature, "top_p": top_p}
    if kind == "vllm":
        settings["extra_body"] = {"top_k": sampling.top_k or -1, "return_token_ids": True, **_UNPENALISED}
    elif kind == "transformers":
        generation = {"do_sample": not sampling.is_greedy, "max_new_tokens": max_new_tokens, "eos_token_id": eos_ids}
        if not sampling.is_greedy:
            generation |= {"temperature": sampling.temperature, "top_k": sampling.top_k or 0, "top_p": top_p}
        settings["extra_body"] = {"generation_config": json.dumps(generation)}
    elif sampling.top_k is not None:
        raise ValueError(
            f"sampling.top_k is {sampling.top_k}, which an OpenAI server does not support; set data.server.kind to "
            "vllm or transformers"
        )
    return settings
