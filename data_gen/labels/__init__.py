"""Acceptance labels: the mathematics of law 4.6, and the forwards that it needs."""
