"""Continuations of one text at many of its places, read side by side."""
