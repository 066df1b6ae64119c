"""What is computed of a batch: the loss that trains, and the metrics that tell."""
