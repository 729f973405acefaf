"""Distributes requests over servers that have loaded the same model, with fail-over.

One event loop in a thread makes all requests, while this process labels. Each server takes up to
data.server.concurrency requests at once; a request goes to the server with the fewest. A server that stops answering,
after the client library's retries, is dropped, and the others take over its requests; when none is left the run stops.
If a second server fails at the same request, or the only one answers 500, that request is refused. Seeds belong to
requests, so results do not depend on which server answers, if servers answer alike.
"""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import asynccontextmanager
from threading import Thread
from typing import Any, TypeVar

import openai
from tqdm import tqdm

from configs.schema import ServerConfig
from data_gen.responses.conversation import ShardSpec
from data_gen.responses.exchange import Answers, RefusedError

Result = TypeVar("Result")
_GONE = (openai.APIConnectionError, openai.InternalServerError)
"""Refused connections, time-outs, 5xx."""
_BROKE, _MOST_FAILURES = 500, 2
"""Status of a server that failed at this request, and the number of servers after which the request is refused."""
_OFFICIAL = "https://api.openai.com/"


def _key_for(url: str, variable: str | None) -> str:
    """The API key for a server: of the named variable; by default OPENAI_API_KEY, for the official address only."""
    if variable is None:
        return os.environ.get("OPENAI_API_KEY", "none") if url.startswith(_OFFICIAL) else "none"
    if variable not in os.environ:
        raise ValueError(
            f"data.server.api_key_variable is {variable}, but that environment variable is not set; set it"
        )
    return os.environ[variable]


class Servers:
    """The servers of data.server, and the event loop of their requests."""

    def __init__(self, config: ServerConfig, *, model: str) -> None:
        self.config, self.model = config, model
        settings: dict[str, Any] = {"max_retries": config.max_retries, "timeout": config.timeout_s}
        keys = {url: _key_for(url, config.api_key_variable) for url in config.urls}
        self._clients = {url: openai.AsyncOpenAI(base_url=url, api_key=keys[url], **settings) for url in config.urls}
        self._num_running, self._changed = dict.fromkeys(config.urls, 0), asyncio.Condition()
        self._end = ""
        """The error of the last server."""
        self._is_closed = False
        self._loop = asyncio.new_event_loop()
        Thread(target=self._loop.run_forever, name="servers", daemon=True).start()

    def run(self, work: Coroutine[Any, Any, Result]) -> Result:
        """The result of a coroutine, run in the loop."""
        if self._is_closed:
            work.close()
            raise ValueError("the run has ended")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def ahead(
        self, specs: Iterable[ShardSpec], ask: Callable[[ShardSpec], Answers]
    ) -> Iterator[tuple[ShardSpec, Answers]]:
        """Each shard with its answers, in order, so that servers are not idle while a shard is labelled and written.

        Beyond two shards (one yielded, one that is finishing), shards are opened until they hold as many conversations
        as requests fit in flight, so only a few shards are in memory; each has a thread. When the caller stops,
        requests are cancelled.
        """
        open_shards: deque[tuple[ShardSpec, Future[Answers]]] = deque()
        waiting, num_at_once = iter(specs), self.config.concurrency * len(self.config.urls)
        pool = ThreadPoolExecutor(num_at_once + 2)
        try:
            while True:
                while sum(len(spec.prompts) for spec, _ in list(open_shards)[2:]) < num_at_once:
                    if (spec := next(waiting, None)) is None:
                        break
                    open_shards.append((spec, pool.submit(ask, spec)))
                if not open_shards:
                    return
                spec, answers = open_shards[0]
                yield spec, answers.result()
                open_shards.popleft()
        finally:
            self._is_closed = True
            pool.shutdown(wait=False, cancel_futures=True)
            self._loop.call_soon_threadsafe(self._cancel)

    def _cancel(self) -> None:
        for task in asyncio.all_tasks(self._loop):
            task.cancel()

    async def ask(self, body: Mapping[str, Any]) -> Any:
        """The JSON answer of one of the servers to a completion request.

        Raises:
            RefusedError: this request is refused, or its answer is not JSON.
            ValueError: no server answers, or one refuses every request (key, model).
        """
        failed: dict[str, openai.APIError] = {}
        while True:
            async with self._slot(failed) as url:
                try:
                    answer = await self.ask_at(url, body)
                except _GONE as error:
                    failed[url] = error
                    if getattr(error, "status_code", None) != _BROKE:
                        self._leave_out(url, error)
                    if len(failed) == _MOST_FAILURES:
                        raise RefusedError(f"two servers failed at this request: {self._reason(url, error)}") from error
                    continue
            for other, failure in failed.items():  # the request is not the cause
                self._leave_out(other, failure)
            return answer

    async def ask_at(self, url: str, body: Mapping[str, Any]) -> Any:
        """The same for one server; errors of connections and 5xx are raised unchanged."""
        try:
            answer = await self._clients[url].completions.with_raw_response.create(model=self.model, **body)
            return json.loads(answer.content)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RefusedError(f"refused: {error}") from error
        except _GONE:
            raise
        except openai.APIStatusError as error:
            raise ValueError(f"{url} answers {error.status_code} for model {self.model!r}: {error.message}") from error
        except (openai.APIError, ValueError) as error:  # a ValueError: not JSON or not UTF-8
            raise RefusedError(
                f"invalid answer from the server: {str(getattr(error, 'doc', None) or error)[:160]!r}"
            ) from error

    def try_each(self, body: Mapping[str, Any], *, hint: str = "") -> dict[str, Any]:
        """The answer of each server to a first request; ValueError, which ends in `hint`, if one gives none."""
        answers = {}
        for url in self.config.urls:
            try:
                answers[url] = self.run(self.ask_at(url, body))
            except _GONE as error:
                raise ValueError(self._reason(url, error)) from error
            except RefusedError as error:
                raise ValueError(f"{url} failed at its first request: {error}{hint}") from error
        return answers

    @asynccontextmanager
    async def _slot(self, failed: Mapping[str, openai.APIError]) -> AsyncIterator[str]:
        """Reserve a slot at a server where this request has not failed, and yield its address."""

        def free() -> list[str]:
            is_free = {url: num < self.config.concurrency for url, num in self._num_running.items()}
            return [url for url in is_free if is_free[url] and url not in failed]

        async with self._changed:
            await self._changed.wait_for(lambda: free() or self._num_running.keys() <= failed.keys())
            if not self._num_running:
                raise ValueError(self._end)
            if not free():
                raise RefusedError("; ".join(self._reason(url, error) for url, error in failed.items()))
            url = min(free(), key=self._num_running.__getitem__)
            self._num_running[url] += 1
        try:
            yield url
        finally:
            if url in self._num_running:
                self._num_running[url] -= 1
            async with self._changed:
                self._changed.notify_all()

    def _leave_out(self, url: str, error: openai.APIError) -> None:
        was_in = self._num_running.pop(url, None) is not None
        if not self._num_running:
            self._end = self._end or self._reason(url, error)
            raise ValueError(self._end) from error
        if was_in:
            num_left = len(self._num_running)
            tqdm.write(f"{self._reason(url, error)}; {num_left} other servers take over its requests", file=sys.stderr)

    def _reason(self, url: str, error: openai.APIError) -> str:
        if isinstance(error, openai.APIStatusError):
            return f"{url} answers {error.status_code} for model {self.model!r}: {error.message}"
        return (
            f"{url} does not answer after {self.config.max_retries} retries ({error}); start the server or raise "
            "data.server.timeout_s, then run the same command again, which keeps the finished shards"
        )
