"""The vLLM plugin, for the V1 runner of one release; `serve` has the parts that do not need vLLM."""
