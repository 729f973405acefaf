"""Distributes requests over servers that have loaded the same model, with fail-over.

One event loop in a thread makes all requests, while this process labels. Each server has data.server.concurrency slots,
and a request takes the next free one. A server that stops answering, after the client library's retries, is left out,
and the others take over its requests; when none is left the run stops. A request that a server answers with 400, 422 or
500 is refused. Seeds belong to requests, so results do not depend on which server answers, if servers answer alike.
"""

import asyncio
import json
import os
import sys
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Thread
from typing import Any, TypeVar

import openai
from tqdm import tqdm

from configs.schema import ServerConfig
from data_gen.responses.exchange import Answers, RefusedError, ShardSpec

Result = TypeVar("Result")
_REFUSING, _FAILING = (400, 422, 500), 500
"""Statuses that concern one request; those above the last concern the server."""
_OFFICIAL = "https://api.openai.com/"


class GoneError(ValueError):
    """A server does not answer: refused connections, time-outs, 502 to 504."""


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

        Beside the shard that is yielded and one that is finishing, enough are open to fill all slots, each in a thread.
        When the caller stops, requests are cancelled.
        """
        num_slots, size = self.config.concurrency * len(self.config.urls), max(len(spec.prompts) for spec in specs)
        num_open = 2 + -(-num_slots // max(1, size))
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

    async def ask(self, body: Mapping[str, Any]) -> Any:
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
                self._leave_out(url, error)
            finally:
                if url in self._live or not self._live:  # without a server, each request that ends wakes the next
                    self._slots.put_nowait(url)

    def _leave_out(self, url: str, error: GoneError) -> None:
        if url in self._live:
            self._live.remove(url)
            self._end = str(error)
            if self._live:
                message = f"{error}; {len(self._live)} other servers take over its requests"
                tqdm.write(message, file=sys.stderr)

    async def ask_at(self, url: str, body: Mapping[str, Any]) -> Any:
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
                f"{url} does not answer after {self.config.max_retries} retries ({error}); start the server or raise "
                "data.server.timeout_s, then run the same command again, which keeps the finished shards"
            ) from error
        except (openai.APIError, ValueError) as error:  # a ValueError: not JSON or not UTF-8
            text = getattr(error, "doc", None) or error
            raise RefusedError(f"invalid answer from the server: {str(text)[:160]!r}") from error
