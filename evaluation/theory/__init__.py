"""Closed forms of speculative decoding, each beside a Monte Carlo run of the real loop."""
