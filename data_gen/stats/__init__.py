"""Acceptance statistics of a pair."""
