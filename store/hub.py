"""What `huggingface_hub` raises if it cannot download or upload."""

# of its HTTP client, which is httpx or a successor
from huggingface_hub.errors import HTTPError  # type: ignore[attr-defined]

NETWORK_ERRORS = (OSError, HTTPError)
"""No network, no login, a refused request, or an endpoint that is no URL."""
HUB_ERRORS = (*NETWORK_ERRORS, ValueError)
"""Those, or an id that no repository can have."""
