"""Files on disk: checksummed shards, JSON, keyed results and locks."""
