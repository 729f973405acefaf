"""Continuous batches, replayed: what every policy comes to where many sequences are decoded together (law 4.13)."""
