"""What heads train on: features, in batches."""
