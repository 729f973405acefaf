"""The stopping policies inside a serving engine: each request of a batch ends its drafts by its own policy."""

KEY = "acceptance_heads"
"""Key of the settings in a server's configuration, and of a policy in a request's extra arguments."""
