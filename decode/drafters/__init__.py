"""Drafters beyond one model and one chain: hierarchies, trees, parallel drafting."""
