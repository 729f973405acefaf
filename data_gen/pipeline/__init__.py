"""From prompts to shards: stages, workers, the engines that run them, and the plan before a run."""
