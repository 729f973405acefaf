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

import torch

from configs.schema import ServerConfig
from data_gen.responses.conversation import ShardSpec, ask, without
from data_gen.responses.dispatch import Servers
from data_gen.responses.exchange import (
    Answers,
    Distributions,
    Exchange,
    FinishReason,
    LatestRows,
    Problem,
    Progress,
    RefusedError,
    Request,
    Response,
    ResponseSource,
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
        self.server, self.spelling, self.sampling, self.reader = server, spelling, sampling, reader
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

    def respond(self, requests: Sequence[Request], seed: int, progress: Progress) -> list[Response | Problem]:
        """One answer per request; ValueError if no server answers, or nearly all answers are invalid."""

        async def answer(request: Request) -> Response:
            body = self._settings_for(request) | {"seed": seed_of(seed, request.id) % _NUM_SEEDS}
            try:
                return self._read(await self.servers.ask(body), request)
            finally:
                progress(1)

        return self.servers.run(self._all(requests, answer))

    def distributions_of(self, exchanges: Sequence[Exchange]) -> list[Distributions | Problem]:
        """The target's distributions at the positions of existing responses; ValueError as `respond`."""
        return self.servers.run(self._all(exchanges, self._distributions_along))

    def ask(self, spec: ShardSpec, source: ResponseSource, **settings: Any) -> Answers:
        """The answers of `source`, these servers or a file, with the target's distributions if there is a reader."""
        answers = ask(spec, source, **settings)
        if self.reader is None:
            return answers
        results = iter(self.distributions_of([row for row in answers.exchanges if row.distributions is None]))
        exchanges, broken = [], dict[int, str]()
        for number, exchange in enumerate(answers.exchanges):
            result = exchange.distributions or next(results)
            if isinstance(result, Problem):
                broken[number] = result.reason
            else:
                exchange = exchange._replace(distributions=result)
            exchanges.append(exchange)
        return without(spec, Answers(exchanges, answers.problems), broken)

    async def _all(self, rows: Sequence[Any], work: Callable[[Any], Coroutine[Any, Any, Any]]) -> list[Any]:
        """The results of `work` in the order of the rows; what the servers refuse is a problem, and nearly only
        problems end the run.
        """
        subject = f"answers of {', '.join(self.server.urls)} are invalid"
        tasks, results = [asyncio.ensure_future(work(row)) for row in rows], list[Any]()
        try:
            for row, task in zip(rows, tasks, strict=True):
                try:
                    results.append(await task)
                except RefusedError as error:
                    results.append(Problem(row.id, "error", str(error)))
                problem = results[-1] if isinstance(results[-1], Problem) else None
                self._latest.add([problem], subject=subject, remedy=_REMEDY)
        finally:
            for task in tasks:
                task.cancel()
        return results

    def _try_each(self) -> None:
        body = self._settings_for(Request("", "one", self.spelling.ids_of("one"))) | {"seed": 0, "max_tokens": 1}
        hint = "" if self.reader is None else f"; start the server with --max-logprobs {self.reader.num_logprobs}"
        answers = self.servers.try_each(body, hint=hint)
        if self.reader is None:
            return
        plain = body | {"temperature": 1.0, "top_p": 1.0, "extra_body": body["extra_body"] | {"top_k": -1}}
        for url, plain_answer in self.servers.try_each(plain).items():
            try:
                positions, plain_positions = (_positions(_choice(answer)) for answer in (answers[url], plain_answer))
                for first_position in (positions, plain_positions):
                    self._distributions(first_position, [None])
                if _is_tempered(positions, plain_positions, self.sampling.temperature):
                    raise RefusedError(
                        "its log-probabilities depend on the temperature; start the server with --logprobs-mode "
                        "raw_logprobs, or set data.labels: target"
                    )
            except RefusedError as error:
                raise ValueError(f"{url} failed at its first request: {error}") from error

    async def _distributions_along(self, exchange: Exchange) -> Distributions:
        """The distributions along a response, from one forward over everything before its last token."""
        assert self.reader is not None
        num = self.reader.num_logprobs
        extra_body = self.settings["extra_body"] | {"top_k": -1, "prompt_logprobs": num}
        text = [*exchange.prompt_ids, *exchange.response_ids[:-1]]
        settings = {"max_tokens": 1, "temperature": 1.0, "logprobs": num, "seed": 0}
        body = {"prompt": text, **settings, "extra_body": extra_body}
        choice = _choice(await self.servers.ask(body))
        positions = [*_positions(choice, of_prompt=True)[len(exchange.prompt_ids) :], *_positions(choice)]
        return self._distributions(positions, [*exchange.response_ids[:-1], None])

    def _distributions(self, positions: Sequence[Mapping[int, float]], tokens: Sequence[int | None]) -> Distributions:
        """The distributions at the positions of these tokens; None: a token that the server has not seen."""
        assert self.reader is not None
        if len(positions) != len(tokens):
            raise RefusedError(f"the server returned log-probabilities at {len(positions)} of {len(tokens)} positions")
        for number, (logprobs, token) in enumerate(zip(positions, tokens, strict=True)):
            wrong = next((name for name in logprobs if not 0 <= name < _NUM_IDS), None)
            if wrong is not None:
                raise RefusedError(
                    f"invalid answer from the server: log-probability of token id {wrong} at position {number}"
                )
            if token is not None and token not in logprobs:
                raise RefusedError(
                    f"the server's log-probabilities at position {number} lack token {token} of the response: they "
                    "belong to another position or another response"
                )
        return self.reader.distributions(positions)

    def _distributions_of_drawn(self, positions: Sequence[Mapping[int, float]], tokens: Sequence[int]) -> Distributions:
        """The distributions at the positions of tokens that the server drew; refused if one had probability 0."""
        distributions = self._distributions(positions, tokens)
        has_prob = ((distributions.ids == torch.tensor(tokens).unsqueeze(-1)) & (distributions.probs > 0)).any(-1)
        for number in (~has_prob).nonzero().flatten().tolist():
            support = distributions.ids[number][distributions.probs[number] > 0].tolist()
            # tokens that are equally likely may fall on either side of a limit
            if positions[number][tokens[number]] < min(positions[number][token] for token in support):
                raise RefusedError(
                    f"token {tokens[number]} at position {number} of the response has probability 0 under "
                    "pair.sampling, by the server's log-probabilities: it uses another sampling, or they belong to "
                    "another position"
                )
        return distributions

    def _settings_for(self, request: Request) -> dict[str, Any]:
        """The request's body, from which the server reads exactly `prompt_ids`."""
        is_exact = self.server.prompt_as == "auto" and self.server.kind == "vllm"
        if is_exact or self.server.prompt_as == "token_ids":
            return {"prompt": request.prompt_ids, **self.settings}
        if "add_special_tokens" in self.server.extra or self.spelling.ids_of(request.text) == request.prompt_ids:
            return {"prompt": request.text, **self.settings}
        if self.server.kind == "vllm":
            extra_body = {**self.settings["extra_body"], "add_special_tokens": False}
            return {"prompt": request.text, **self.settings, "extra_body": extra_body}
        raise ValueError(
            "data.template is chat, whose text already has this tokenizer's special tokens, but a server of kind "
            f"{self.server.kind} adds them again; set data.server.prompt_as to token_ids, data.server.kind to vllm, or "
            "add_special_tokens in data.server.extra"
        )

    def _read(self, completion: Any, request: Request) -> Response:
        choice = _choice(completion)
        text, token_ids, reason = choice.get("text"), choice.get("token_ids"), choice.get("finish_reason")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise RefusedError(f"invalid answer from the server, expected one choice: {str(completion)[:160]!r}")
        ended: FinishReason = reason
        if token_ids is None:
            answer = self.spelling.of_text(text, ended, request)
        elif isinstance(token_ids, list):
            answer = self.spelling.of_ids(token_ids, ended, text=text)
        else:
            raise RefusedError(f"invalid answer from the server: token_ids is not a list: {token_ids!r:.80}")
        limit, num_tokens = self.settings["max_tokens"], len(answer.response_ids)
        if num_tokens > limit + (ended == "stop"):
            raise RefusedError(f"the server returned {num_tokens} tokens, more than the requested {limit}")
        if self.reader is None:
            return answer
        distributions = self._distributions_of_drawn(_positions(choice), answer.response_ids)
        return answer._replace(distributions=distributions)


def _choice(completion: Any) -> dict[str, Any]:
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RefusedError(f"invalid answer from the server, expected one choice: {str(completion)[:160]!r}")
    return choices[0]


def _positions(choice: Mapping[str, Any], *, of_prompt: bool = False) -> list[dict[int, float]]:
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
        found = choice.get("prompt_logprobs" if of_prompt else "logprobs")
        raise RefusedError(
            "data.labels: server needs log-probabilities by token id, as vLLM returns them, but the server returned "
            f"{str(found)[:80]!r}; set data.labels: target"
        ) from error


def _is_tempered(
    positions: Sequence[Mapping[int, float]], plain: Sequence[Mapping[int, float]], temperature: float | int
) -> bool:
    """Whether the temperature divided the distance between the largest and smallest log-probability."""
    if temperature in (0, 1):
        return False
    spread, spread_at_1 = (max(p[0].values()) - min(p[0].values()) for p in (positions, plain))
    return abs(spread - spread_at_1) > abs(spread - spread_at_1 / temperature)


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
