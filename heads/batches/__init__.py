"""Training batches of features."""
