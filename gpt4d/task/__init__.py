"""Tasks: what a model is trained for. Batches, loss, validation, samples and the identity of the data."""
