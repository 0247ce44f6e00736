"""Gradient exchange: which gradients travel together, when, and what that costs."""
