"""From prompts to shards: stages, workers, engines, and the plan beforehand."""
