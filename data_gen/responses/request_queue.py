"""Distributes requests over servers that have loaded the same model, with fail-over.

Each server takes up to data.server.concurrency requests at once; a request goes to the server with the fewest. A server
that stops answering, after the client library's retries, is dropped, and the others take over its requests; when none
is left the run stops. If a second server fails at the same request, or the only one answers 500, that request is
refused. Seeds belong to requests, so results do not depend on which server answers, if servers answer alike.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from threading import Condition
from typing import Any, TypeVar

import openai
from tqdm import tqdm

from configs.schema import ServerConfig

Answer = TypeVar("Answer")
_GONE = (openai.APIConnectionError, openai.InternalServerError)
"""Refused connections, time-outs, 5xx."""
_BROKE, _MOST_FAILURES = 500, 2
"""Status of a server that failed at this request, and the number of servers after which the request is refused."""
_OFFICIAL = "https://api.openai.com/"


def _key_for(url: str, variable: str | None) -> str:
    """The API key for a server: of the named variable; by default OPENAI_API_KEY, for the official address only.

    Raises:
        ValueError: the variable is not set.
    """
    if variable is None:
        return os.environ.get("OPENAI_API_KEY", "none") if url.startswith(_OFFICIAL) else "none"
    if variable not in os.environ:
        raise ValueError(
            f"data.server.api_key_variable is {variable}, but that environment variable is not set; set it, or remove "
            "the setting"
        )
    return os.environ[variable]


class RefusedError(ValueError):
    """An answer to one request that is not a completion, for a reason that does not concern other requests."""


class Servers:
    """The servers of data.server, with one queue."""

    def __init__(self, config: ServerConfig, *, model: str) -> None:
        """Args:
        config: addresses, time-outs and retries.
        model: the target's name on the servers.
        """
        self.config, self.model = config, model
        self._clients = {
            url: openai.OpenAI(
                base_url=url,
                api_key=_key_for(url, config.api_key_variable),
                max_retries=config.max_retries,
                timeout=config.timeout_s,
            )
            for url in config.urls
        }
        self._changed, self._num_under_way = Condition(), dict.fromkeys(config.urls, 0)
        self._end = ""
        """The error of the last server."""
        self._pool = ThreadPoolExecutor(self.num_at_once)

    @property
    def num_at_once(self) -> int:
        """Number of requests in flight at once."""
        return self.config.concurrency * len(self.config.urls)

    @property
    def name(self) -> str:
        """The servers in messages."""
        return ", ".join(self.config.urls)

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Run `work`, which makes one request, when a slot is free."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Cancel the requests that still wait."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, body: Mapping[str, Any]) -> Any:
        """The JSON answer of one of the servers to a completion request.

        Raises:
            RefusedError: this request is refused, or its answer is not JSON.
            ValueError: no server answers, or one refuses every request (key, model).
        """
        failed: dict[str, openai.APIError] = {}
        while True:
            with self._slot(but=failed) as url:
                try:
                    answer = self.ask_at(url, body)
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

    def ask_at(self, url: str, body: Mapping[str, Any]) -> Any:
        """The same for one server; errors of connections and 5xx are raised unchanged."""
        try:
            answer = self._clients[url].completions.with_raw_response.create(model=self.model, **body)
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
        """The answer of each server to a first request.

        Args:
            body: the request.
            hint: appended to the message if a server refuses it.

        Raises:
            ValueError: a server does not answer, or refuses it.
        """
        answers = {}
        for url in self._clients:
            try:
                answers[url] = self.ask_at(url, body)
            except _GONE as error:
                raise ValueError(self._reason(url, error)) from error
            except RefusedError as error:
                raise ValueError(f"{url} failed at its first request: {error}{hint}") from error
        return answers

    @contextmanager
    def _slot(self, but: Mapping[str, openai.APIError]) -> Iterator[str]:
        """Reserve a slot at a server for the block, and yield its address; never one of `but`, where it failed."""

        def free() -> list[str]:
            return [url for url, num in self._num_under_way.items() if num < self.config.concurrency and url not in but]

        with self._changed:
            self._changed.wait_for(lambda: free() or self._num_under_way.keys() <= but.keys())
            if not self._num_under_way:
                raise ValueError(self._end)
            if not free():
                raise RefusedError("; ".join(self._reason(url, error) for url, error in but.items()))
            url = min(free(), key=self._num_under_way.__getitem__)
            self._num_under_way[url] += 1
        try:
            yield url
        finally:
            with self._changed:
                if url in self._num_under_way:
                    self._num_under_way[url] -= 1
                self._changed.notify_all()

    def _leave_out(self, url: str, error: openai.APIError) -> None:
        """Drop a server.

        Raises:
            ValueError: it was the last one.
        """
        with self._changed:
            was_in = self._num_under_way.pop(url, None) is not None
            num_left = len(self._num_under_way)
            self._end = self._end if num_left else self._end or self._reason(url, error)
            self._changed.notify_all()
        if not num_left:
            raise ValueError(self._end) from error
        if was_in:
            tqdm.write(f"{self._reason(url, error)}; {num_left} other servers take over its requests", file=sys.stderr)

    def _reason(self, url: str, error: openai.APIError) -> str:
        if isinstance(error, openai.APIStatusError):
            return f"{url} answers {error.status_code} for model {self.model!r}: {error.message}"
        return (
            f"{url} does not answer after {self.config.max_retries} retries ({error}); start the server or raise "
            "data.server.timeout_s, then run the same command again, which keeps the finished shards"
        )
