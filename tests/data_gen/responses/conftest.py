"""Servers in this process, and the toy run that has its responses from one."""

import pytest

from configs.schema import ServerConfig
from tests.data_gen.on_disk import with_data
from tests.toys.answering import answering, echo, url_of


@pytest.fixture
def server():
    with answering(echo) as server:
        yield server


@pytest.fixture
def second():
    with answering(echo) as server:
        yield server


@pytest.fixture
def served(toy_config, server):
    """The toy run with its responses from `server`."""
    served = ServerConfig(url=url_of(server), max_retries=2, timeout_s=30, concurrency=3)
    return with_data(toy_config, source="server", server=served, max_error_share=1.0)
