"""What a prediction is worth: metrics that need no network."""
