"""All heads of the grid in one Lightning run."""
