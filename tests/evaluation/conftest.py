"""What a stop costs is timed once."""

import pytest


@pytest.fixture(autouse=True, scope="session")
def one_turn():
    """No test reads how long a stop takes, beyond a bound that one turn keeps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("evaluation.costs.stops._MOST_TURNS", 1)
        patch.setattr("evaluation.costs.measure._TURNS", 1)
        yield
