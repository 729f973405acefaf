"""Drafters made of drafters (law 4.12): HSDDW, and Chen's variant."""
