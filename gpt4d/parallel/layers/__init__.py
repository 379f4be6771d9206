"""Layers on the 4-D grid: specs without torch, and a module `*_kernels` with the torch kernels of each."""
