"""Real generations on a clock, beside what replay and the cost model predict of them."""
