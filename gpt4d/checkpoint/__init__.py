"""Checkpoints: saving, loading on any grid, verification, and conversion from and to Hugging Face libraries."""
