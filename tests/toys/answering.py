"""A completions server of a few lines, which answers as a test tells it to, and what a run made of its answers."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from configs.schema import Config
from data_gen.store.rows import read_rows
from store.shards import list_shards


class Answering(BaseHTTPRequestHandler):
    """A completions server whose `answer(body, attempt)` gives (status, reply); a reply that is a function gets it."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.bodies.append(body)
        attempt = sum(other["prompt"] == body["prompt"] for other in self.server.bodies)
        status, reply = self.server.answer(body, attempt)
        if callable(reply):
            reply(self)
            return
        content = (reply if isinstance(reply, str) else json.dumps(reply)).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def answering(answer: Callable[[dict, int], tuple[int, object]]) -> Iterator[ThreadingHTTPServer]:
    """A server on this machine with this `answer`; `bodies` are the requests that it got."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.bodies, server.answer = [], answer
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


def completion(text: str, finish_reason: str = "stop", **more: object) -> tuple[int, dict]:
    choice = {"index": 0, "text": text, "finish_reason": finish_reason, "logprobs": None, **more}
    return 200, {"id": "c", "object": "text_completion", "created": 0, "model": "m", "choices": [choice]}


def echo(body: dict, attempt: int) -> tuple[int, dict]:
    """An answer that depends on the request alone."""
    return completion(f"{body['seed'] % 1000}")


def url_of(server: ThreadingHTTPServer) -> str:
    return f"http://127.0.0.1:{server.server_port}/v1"


def all_rows(config: Config) -> dict[str, dict]:
    shards = [path for split in ("train", "test") for path in list_shards(config.data.dir, split)]
    return {row["id"]: row for path in shards for row in read_rows(path).to_pylist()}


def problems(config: Config) -> dict[str, str]:
    lines = (Path(config.data.dir) / "errors.jsonl").read_text().splitlines()
    return {problem["id"]: problem["reason"] for problem in map(json.loads, lines)}


def close_half_way(handler: Answering) -> None:
    """Promise a thousand bytes, send ten."""
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices"')
    handler.close_connection = True
