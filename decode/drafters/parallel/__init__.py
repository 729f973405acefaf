"""Draft and target at work at the same time: PEARL, what it costs, and its replay from a trace."""
