"""The policies inside the engine that people serve with: every request of a batch stops its draft where its own policy
says.
"""

KEY = "acceptance_heads"
"""Under which a server's configuration, and a request's extra arguments, say how drafts stop."""
