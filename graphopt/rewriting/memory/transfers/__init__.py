"""Transfers put into a program: activations that are offloaded, and inputs that reside on the host or a disk.

In comes a program with what is to move; copies away and back are put in. Start with ``transfer_insertion``. In
reading order: ``transfer_insertion``, ``state_swaps``.
"""
