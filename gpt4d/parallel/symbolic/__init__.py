"""Tensors without values, their kernels and their autograd graph: the planner runs layers on them. No torch here."""
