"""What the data says about the acceptance of a pair."""
