"""The papers' tables, laid out as printed, for the pair of a config."""
