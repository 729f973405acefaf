"""A server in this process, and the toy run that has its responses from it."""

import threading
from http.server import ThreadingHTTPServer
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from configs.schema import ServerConfig
from tests.toys.answering import Answering, completion


@pytest.fixture
def server():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Answering)
    server.bodies, server.answer = [], lambda body, attempt: completion("hello")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture
def served(toy_config, with_data, server):
    """The toy run with its responses from `server`."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    served = ServerConfig(url=url, max_retries=2, timeout_s=5, concurrency=3)
    return with_data(toy_config, source="server", server=served, max_error_share=1.0)


@pytest.fixture(scope="session")
def tokenizer(toy_pair: Path):
    return AutoTokenizer.from_pretrained(toy_pair / "target")
