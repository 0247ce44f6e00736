"""Copies beside a computation: when they start and end, what they are worth, and batches in slices.

In come a plan and the lanes of a link; out comes the plan with values offloaded. Start with ``offloading``. In
reading order: ``offloading``, ``copies``, ``swapping``, ``slices``.
"""
