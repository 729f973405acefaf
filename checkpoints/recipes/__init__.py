"""The recipe of the embedded trio."""
