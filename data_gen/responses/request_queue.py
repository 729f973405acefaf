"""Servers that have loaded the same model: which of them takes a request, and what becomes of those of one that dies.

Each takes so many requests at once as data.server.concurrency says; a request goes to the one with the fewest, in the
order in which requests were submitted. One that does not answer any more, after the client library's retries, is left
out from then on, and the others take its requests over; when none is left the run stops. A request at which a second
server fails, or the only one answers 500, is refused itself. Seeds are of the request, so nothing depends on which
server answers it, as far as servers with one model answer alike.
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

from configs.remote import ServerConfig

Answer = TypeVar("Answer")
_GONE = (openai.APIConnectionError, openai.InternalServerError)
"""Refused connections, time-outs, 5xx."""
_BROKE, _MOST_FAILURES = 500, 2
"""Status by which a server says that it failed at this request, and the number of servers that may fail at one."""
_OFFICIAL = "https://api.openai.com/"


def _key_for(url: str, variable: str | None) -> str:
    """The key that a server is sent: that of a named variable; by default OPENAI_API_KEY, to its own address alone.

    Raises:
        ValueError: the variable is not set.
    """
    if variable is None:
        return os.environ.get("OPENAI_API_KEY", "none") if url.startswith(_OFFICIAL) else "none"
    if variable not in os.environ:
        raise ValueError(
            f"data.server.api_key_variable is {variable}, and no environment variable of this name is set; set it, or "
            "leave the setting out"
        )
    return os.environ[variable]


class RefusedError(ValueError):
    """An answer to one request that is no completion, and not for a reason that concerns the others too."""


class Servers:
    """The servers of data.server, behind one queue."""

    def __init__(self, config: ServerConfig, *, model: str) -> None:
        """Args:
        config: where they are, and how patiently they are asked.
        model: the target's name on them.
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
        """What the last of them said."""
        self._pool = ThreadPoolExecutor(self.num_at_once)

    @property
    def num_at_once(self) -> int:
        """Requests that are under way at once."""
        return self.config.concurrency * len(self.config.urls)

    @property
    def name(self) -> str:
        """The servers in messages."""
        return ", ".join(self.config.urls)

    def submit(self, work: Callable[[], Answer]) -> Future[Answer]:
        """Do `work`, which asks once, as soon as it is its turn."""
        return self._pool.submit(work)

    def close(self) -> None:
        """Send no request that still waits."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def ask(self, body: Mapping[str, Any]) -> Any:
        """The JSON that one of the servers answers to a completion request.

        Raises:
            RefusedError: this request is refused, or its answer is no JSON.
            ValueError: no server answers any more, or one says that every request is in vain (key, model).
        """
        failed: dict[str, openai.APIError] = {}
        while True:
            with self._place(but=failed) as url:
                try:
                    answer = self.ask_at(url, body)
                except _GONE as error:
                    failed[url] = error
                    if getattr(error, "status_code", None) != _BROKE:
                        self._leave_out(url, error)
                    if len(failed) == _MOST_FAILURES:
                        raise RefusedError(f"two servers fail at this request: {self._says(url, error)}") from error
                    continue
            for other, failure in failed.items():  # it is not the request
                self._leave_out(other, failure)
            return answer

    def ask_at(self, url: str, body: Mapping[str, Any]) -> Any:
        """The same of one of them; what says that it is gone is raised as it is."""
        try:
            answer = self._clients[url].completions.with_raw_response.create(model=self.model, **body)
            return json.loads(answer.content)
        except (openai.BadRequestError, openai.UnprocessableEntityError) as error:
            raise RefusedError(f"refused: {error}") from error
        except _GONE:
            raise
        except openai.APIStatusError as error:
            raise ValueError(f"{url} answers {error.status_code} for model {self.model!r}: {error.message}") from error
        except (openai.APIError, ValueError) as error:  # a ValueError: no JSON, no UTF-8
            raise RefusedError(
                f"garbage from the server: {str(getattr(error, 'doc', None) or error)[:160]!r}"
            ) from error

    def try_each(self, body: Mapping[str, Any], *, hint: str = "") -> dict[str, Any]:
        """What each server answers to a first request.

        Args:
            body: the request.
            hint: what the message says of a server that refuses it.

        Raises:
            ValueError: one of them does not answer, or refuses it.
        """
        answers = {}
        for url in self._clients:
            try:
                answers[url] = self.ask_at(url, body)
            except _GONE as error:
                raise ValueError(self._says(url, error)) from error
            except RefusedError as error:
                raise ValueError(f"{url}, at its first request: {error}{hint}") from error
        return answers

    @contextmanager
    def _place(self, but: Mapping[str, openai.APIError]) -> Iterator[str]:
        """The address of a server that takes one more request, for as long as the block lasts; none at which it
        failed.
        """

        def free() -> list[str]:
            return [url for url, num in self._num_under_way.items() if num < self.config.concurrency and url not in but]

        with self._changed:
            self._changed.wait_for(lambda: free() or self._num_under_way.keys() <= but.keys())
            if not self._num_under_way:
                raise ValueError(self._end)
            if not free():
                raise RefusedError("; ".join(self._says(url, error) for url, error in but.items()))
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
        """Ask a server no more.

        Raises:
            ValueError: it was the last.
        """
        with self._changed:
            was_in = self._num_under_way.pop(url, None) is not None
            num_left = len(self._num_under_way)
            self._end = self._end if num_left else self._end or self._says(url, error)
            self._changed.notify_all()
        if not num_left:
            raise ValueError(self._end) from error
        if was_in:
            tqdm.write(f"{self._says(url, error)}; {num_left} others take its requests over", file=sys.stderr)

    def _says(self, url: str, error: openai.APIError) -> str:
        if isinstance(error, openai.APIStatusError):
            return f"{url} answers {error.status_code} for model {self.model!r}: {error.message}"
        return (
            f"{url} does not answer after {self.config.max_retries} retries ({error}): start the server or raise "
            "data.server.timeout_s, then run the same command again: it keeps the whole shards"
        )
