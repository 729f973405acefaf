"""One recording from which every policy is replayed (law 4.10)."""
