"""Closed forms of speculative decoding under i.i.d. acceptance."""
