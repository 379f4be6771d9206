"""Decisions about weights and gradients of a step, without torch: the runtime and the planner carry them out."""
