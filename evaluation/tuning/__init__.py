"""The threshold that tunes itself (law 4.11)."""
