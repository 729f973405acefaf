"""Policies side by side: settings chosen on dev, gains on test, the tables of an evaluation."""
