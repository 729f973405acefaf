"""A server in this process, and the toy run that has its responses from it."""

import pytest

from configs.schema import ServerConfig
from tests.data_gen.on_disk import with_data
from tests.toys.answering import answering, completion


@pytest.fixture
def server():
    with answering(lambda body, attempt: completion("hello")) as server:
        yield server


@pytest.fixture
def served(toy_config, server):
    """The toy run with its responses from `server`."""
    url = f"http://127.0.0.1:{server.server_port}/v1"
    served = ServerConfig(url=url, max_retries=2, timeout_s=5, concurrency=3)
    return with_data(toy_config, source="server", server=served, max_error_share=1.0)
