"""`source: server` and `labels: server`: responses from OpenAI-compatible completions servers, many requests at
once, and the target's distributions from their log-probabilities (`data_gen.responses.top_logprobs`).

One event loop in a thread makes all requests, while this process labels. Each server has data.server.concurrency
slots, and a request takes the next free one. docs/servers.md says when a server is left out, a request becomes a
problem, and the run stops. Servers differ in how they take `top_k`, and in whether they sample at all:
`server.kind` names the dialect.

The distributions along an existing response come from `prompt_logprobs` of prompt + X_<n, and the last one from
the token that the server generates after it: one forward, as in this process.
"""

import asyncio
import json
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any, TypeVar

import openai
from tqdm import tqdm

from configs.schema import ServerConfig
from data_gen.responses.connection import client_of, key_for, proxy_of
from data_gen.responses.exchange import (
    Answers,
    Distributions,
    Exchange,
    LatestRows,
    Problem,
    Progress,
    RefusedError,
    Request,
    ShardSpec,
    in_order,
)
from data_gen.responses.settings import request_settings
from data_gen.responses.text import Spelling
from data_gen.responses.top_logprobs import distributions_of
from lm import Sampling
from lm.draws import seed_of

Result = TypeVar("Result")
Row = TypeVar("Row", Request, Exchange)
_REFUSING = (400, 422, 500)
_FAILING = 500
"""Statuses that concern one request; those above the last concern the server."""
_NUM_SEEDS = _NUM_IDS = 2**31
"""Servers accept seeds of 31 bits."""
_REMEDY = (
    "check data.server, data.template and any proxy in between, then run the same command again, which keeps the "
    "finished shards"
)
_PREFIX = "token_id:"
"""How vLLM writes token ids where OpenAI has their texts."""
_INVALID = "invalid answer from the server"
_Positions = list[dict[int, float]]
"""{token id: log-probability} at each position."""


class GoneError(ValueError):
    """A server does not answer, after the client library's retries: refused connections, time-outs, 502 to 504."""


class Servers:
    """The servers of data.server, and the event loop of their requests."""

    def __init__(self, config: ServerConfig, *, model: str) -> None:
        self.config = config
        self.model = model
        keys = {url: key_for(url, config.api_key_variable) for url in config.urls}
        self._clients = {url: client_of(url, keys[url], config) for url in config.urls}
        self._live = set(config.urls)
        self._end = ""
        """Why no server is left."""
        self._slots = asyncio.Queue[str]()
        for url in config.urls * config.concurrency:
            self._slots.put_nowait(url)
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="servers", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, run in the loop."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def ahead(
        self, specs: Sequence[ShardSpec], ask: Callable[[ShardSpec], Answers]
    ) -> Iterator[tuple[ShardSpec, Answers]]:
        """Each shard with its answers, in order, so that servers are not idle while a shard is labelled and written.

        Beside the shard that is yielded and one that is finishing, enough are open to fill all slots, each in a
        thread. When the caller stops, requests are cancelled.
        """
        num_slots = self.config.concurrency * len(self.config.urls)
        num_open = 2 + -(-num_slots // max(1, *(len(spec.prompts) for spec in specs)))
        pool = ThreadPoolExecutor(num_open)
        try:
            answers = deque(pool.submit(ask, spec) for spec in specs[:num_open])
            for index, spec in enumerate(specs):
                yield spec, answers.popleft().result()
                answers.extend(pool.submit(ask, later) for later in specs[index + num_open :][:1])
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
            self._loop.call_soon_threadsafe(self._close)

    def _close(self) -> None:
        self._live.clear()
        self._end = "the run has ended"
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def ask(self, body: Mapping[str, Any]) -> object:
        """The JSON answer of one of the servers to a completion request.

        Raises:
            RefusedError: this request is refused, or its answer is not JSON.
            ValueError: no server answers, or one refuses every request (key, model).
        """
        while True:
            url = await self._slots.get()
            try:
                if not self._live:
                    raise ValueError(self._end)
                if url in self._live:
                    return await self.ask_at(url, body)
            except GoneError as error:
                if url in self._live:
                    self._live.remove(url)
                    self._end = str(error)
                    if self._live:
                        tqdm.write(f"{error}; {len(self._live)} other servers take over its requests", file=sys.stderr)
            finally:
                if url in self._live or not self._live:  # without a server, each request that ends wakes the next
                    self._slots.put_nowait(url)

    async def ask_at(self, url: str, body: Mapping[str, Any]) -> object:
        """The same for one server; GoneError if it does not answer."""
        try:
            answer = await self._clients[url].completions.with_raw_response.create(model=self.model, **body)
            return json.loads(answer.content)
        except openai.APIStatusError as error:
            status = error.status_code
            kind = RefusedError if status in _REFUSING else GoneError if status > _FAILING else ValueError
            raise kind(f"{url} answers {status} for model {self.model!r}: {error.message}") from error
        except openai.APIConnectionError as error:
            raise GoneError(
                f"{url} does not answer after {self.config.max_retries} retries ({error}{proxy_of(url)}); start "
                "the server or raise data.server.timeout_s, then run the command again, which keeps the finished shards"
            ) from error
        except (openai.APIError, ValueError) as error:  # a ValueError: not JSON or not UTF-8
            text = getattr(error, "doc", None) or error
            raise RefusedError(f"invalid answer from the server: {str(text)[:160]!r}") from error


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
        num_logprobs: int | None = None,
    ) -> None:
        """Check the sampling, and that several servers answer, with distributions if there are `num_logprobs`."""
        self._latest = LatestRows()
        self.server = server
        self.spelling = spelling
        self.sampling = sampling
        self.num_logprobs = num_logprobs
        self.settings = request_settings(
            server.kind, sampling, max_new_tokens=max_new_tokens, eos_ids=sorted(spelling.eos_ids)
        )
        extra_body = self.settings.get("extra_body", {})
        if num_logprobs is not None:
            self.settings["logprobs"] = num_logprobs
            extra_body |= {"return_tokens_as_token_ids": True}
        self.settings["extra_body"] = extra_body | server.extra
        self.servers = Servers(server, model=model)
        if num_logprobs is not None or len(server.urls) > 1:
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
        num = self.num_logprobs
        extra_body = self.settings["extra_body"] | {"top_k": -1, "prompt_logprobs": num}
        settings = {"max_tokens": 1, "temperature": 1.0, "logprobs": num, "seed": 0, "extra_body": extra_body}

        async def read(exchange: Exchange) -> Exchange:
            before = [*exchange.prompt_ids, *exchange.response_ids[:-1]]
            completion = await self.servers.ask({"prompt": before, **settings})
            choice = _choice(completion)
            _refuse_other_prompt(completion, choice, before)
            positions = _positions(choice, of_prompt=True)[len(exchange.prompt_ids) :] + _positions(choice)
            tokens = [*exchange.response_ids[:-1], None]  # the server has not seen the last one
            return exchange._replace(distributions=self._distributions(positions, tokens))

        return self._all(exchanges, read)

    def labelled(self, spec: ShardSpec, answers: Answers) -> Answers:
        """The answers, all with the target's distributions, also those of a file or an earlier run."""
        without = [exchange for exchange in answers.exchanges if exchange.distributions is None]
        return in_order(spec, [*answers.exchanges, *answers.problems, *self.with_distributions(without)])

    def _all(
        self, rows: Sequence[Row], work: Callable[[Row], Coroutine[Any, Any, Exchange]]
    ) -> list[Exchange | Problem]:
        """The results of `work` in the order of the rows; what the servers refuse is a problem, and nearly only
        problems end the run.
        """
        subject = f"answers of {', '.join(self.server.urls)} are invalid"

        async def result_of(row: Row) -> Exchange | Problem:
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
            hint = "" if self.num_logprobs is None else f"; start the server with --max-logprobs {self.num_logprobs}"
            try:
                answer = self.servers.run(self.servers.ask_at(url, body))
                hint = ""
                if self.num_logprobs is not None:
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
        """The distributions at the positions of these tokens; None: a token that the server has not seen.
        `are_drawn`: the server drew the tokens, so none may have probability 0.
        """
        assert self.num_logprobs is not None
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
        return distributions_of(
            positions, self.sampling, num_logprobs=self.num_logprobs, num_ids=self.spelling.num_ids, drawn=drawn
        )

    def _body(self, request: Request) -> dict[str, Any]:
        """The request's body, from which the server reads exactly `prompt_ids`."""
        is_vllm = self.server.kind == "vllm"
        prompt_as = self.server.prompt_as
        if prompt_as == "token_ids" or (prompt_as == "auto" and is_vllm):
            return {"prompt": request.prompt_ids, **self.settings}
        body = {"prompt": request.text, **self.settings}
        read_ids = self.spelling.tokenizer(request.text)["input_ids"]  # with the special tokens that it adds
        if "add_special_tokens" in self.server.extra or read_ids == request.prompt_ids:
            return body
        if is_vllm:
            return body | {"extra_body": {**self.settings["extra_body"], "add_special_tokens": False}}
        raise ValueError(
            "prompts have other special tokens than this tokenizer adds to their text (those of a chat template, or no "
            f"end-of-sequence), but a server of kind {self.server.kind} adds them again; set data.server.prompt_as to "
            "token_ids, data.server.kind to vllm, or add_special_tokens in data.server.extra"
        )

    def _read(self, completion: object, request: Request) -> Exchange:
        choice = _choice(completion)
        _refuse_other_prompt(completion, choice, request.prompt_ids)
        text = choice.get("text")
        reason = choice.get("finish_reason")
        if not isinstance(text, str) or reason not in ("stop", "length"):
            raise RefusedError(f"{_INVALID}, expected one choice: {str(completion)[:160]!r}")
        answer = self.spelling.answer(request, reason, text=text, ids=choice.get("token_ids"))
        limit = self.settings["max_tokens"]
        ids = answer.response_ids
        if len(ids) > limit + (reason == "stop"):
            raise RefusedError(f"the server returned {len(ids)} tokens, more than the requested {limit}")
        if reason == "length" and 0 < _usage(completion, "completion_tokens") < limit:
            raise RefusedError(
                f"the server cut the response after {_usage(completion, 'completion_tokens')} of {limit} tokens; give "
                "it a longer context"
            )
        if choice.get("token_ids") is None:
            _refuse_other_count(completion, ids, eos_ids=self.spelling.eos_ids)
        if self.num_logprobs is None:
            return answer
        return answer._replace(distributions=self._distributions(_positions(choice), ids, are_drawn=True))


def _choice(completion: object) -> dict[str, Any]:
    choices = completion.get("choices") if isinstance(completion, dict) else None
    if not isinstance(choices, list) or len(choices) != 1 or not isinstance(choices[0], dict):
        raise RefusedError(f"{_INVALID}, expected one choice: {str(completion)[:160]!r}")
    return choices[0]


def _usage(completion: object, name: str) -> int:
    """A number of tokens in the answer's `usage`; 0 if the server does not report it."""
    usage = completion.get("usage") if isinstance(completion, dict) else None
    number = usage.get(name) if isinstance(usage, dict) else None
    return number if type(number) is int else 0


def _refuse_other_count(completion: object, ids: Sequence[int], *, eos_ids: frozenset[int]) -> None:
    """RefusedError if the server generated another number of tokens than its text has under this tokenizer;
    servers count end-of-sequence or leave it out.
    """
    num_generated = _usage(completion, "completion_tokens")
    num_without_eos = len(ids) - (ids[-1] in eos_ids)
    if num_generated not in (0, num_without_eos, len(ids)):
        raise RefusedError(
            f"the server generated {num_generated} tokens (usage.completion_tokens), but its text has {len(ids)} here: "
            "it wrote the text with other tokens, or cut off a stop sequence; let it return token ids "
            "(data.server.kind: vllm), or remove stop sequences from data.server.extra"
        )


def _refuse_other_prompt(completion: object, choice: Mapping[str, object], prompt_ids: Sequence[int]) -> None:
    """RefusedError if the answer shows that the server read another prompt than these ids."""
    num_read = _usage(completion, "prompt_tokens")
    if num_read not in (0, len(prompt_ids)):
        raise RefusedError(
            f"the server read a prompt of {num_read} tokens (usage.prompt_tokens), but {len(prompt_ids)} were sent: "
            "it cuts prompts, adds a token such as a second BOS, or wraps them in its own template"
        )
    if isinstance(completion, dict) and completion.get("truncated"):
        raise RefusedError("the server truncated the prompt or the response; give it a longer context")
    read_ids = choice.get("prompt_token_ids")
    if isinstance(read_ids, list) and read_ids != list(prompt_ids):
        raise RefusedError("the server read other prompt ids (prompt_token_ids) than those that were sent")


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
