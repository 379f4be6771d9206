"""Layers on the 4-D grid: each module has the spec of a layer and its kernels, and imports torch at their first use."""
