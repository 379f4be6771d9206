"""The optimizer and its learning rates."""
