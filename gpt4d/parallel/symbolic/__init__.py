"""Tensors without values, their autograd graph and a stage of them: the planner runs layers on them. No torch here."""
