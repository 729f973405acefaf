"""The text that the embedded trio learned, and the prompts of its experiments."""
