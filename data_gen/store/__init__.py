"""What is on disk: shards, rows, labels, the manifest, and the account of what failed."""
