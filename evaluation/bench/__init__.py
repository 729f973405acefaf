"""Wall clock of the loop beside transformers' assisted generation."""
