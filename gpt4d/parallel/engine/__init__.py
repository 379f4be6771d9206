"""Policies for the weights, gradients and chunks of a step, without torch. The runtime and the planner execute them."""
