"""gpt4d: train GPTs on a 4-D grid of devices."""

__version__ = "0.1.0"
