"""What a round costs in seconds (law 4.9)."""
