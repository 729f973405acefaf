"""What `huggingface_hub` raises if it cannot download or upload, and what it has downloaded before."""

from pathlib import Path

from huggingface_hub import try_to_load_from_cache

# of its HTTP client, which is httpx or a successor
from huggingface_hub.errors import HFValidationError, HTTPError  # type: ignore[attr-defined]

NETWORK_ERRORS = (OSError, HTTPError)
"""No network, no login, a refused request, or an endpoint that is no URL."""
HUB_ERRORS = (*NETWORK_ERRORS, ValueError)
"""Those, or an id that no repository can have."""


def is_on_disk(model: str) -> bool:
    """Whether a model is a directory, or a hub id whose config.json is in the cache."""
    if Path(model, "config.json").is_file():
        return True
    try:
        return isinstance(try_to_load_from_cache(model, "config.json"), str)
    except HFValidationError:  # a path
        return False
