"""Data: corpora, token and image files, and the loaders of batches."""
