"""One causal model fed token by token: eager, compiled, and what is checked before either is trusted."""
