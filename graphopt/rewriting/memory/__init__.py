"""Recomputation, offload, and fitting a program into a number of bytes.

In reading order: ``budget_text``, ``free_memory``.
"""
