"""What is on disk: shards, rows, features, the manifest, and the account of what failed."""
