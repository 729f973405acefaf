"""What is written and found again: shards with their sums, JSON, and locks; the ground floor, which every room uses."""
