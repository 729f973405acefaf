"""Layers of a KV cache that roll back exactly, one file per way of doing it."""
