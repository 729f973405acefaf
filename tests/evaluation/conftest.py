"""Models here are toys: a second thread only costs them."""

import pytest
import torch


@pytest.fixture(autouse=True, scope="session")
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True, scope="session")
def one_turn():
    """No test reads how long a stop takes, beyond a bound that one turn keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluation.costs.stops._MOST_TURNS", 1)
        patch.setattr("evaluation.costs.measure._TURNS", 1)
        yield
