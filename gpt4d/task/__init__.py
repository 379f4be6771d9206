"""Training tasks: their batches, loss, validation, samples and the identity of their data."""
