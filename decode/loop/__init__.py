"""The lossless speculative loop: drafters, signals, decoder, counts."""
