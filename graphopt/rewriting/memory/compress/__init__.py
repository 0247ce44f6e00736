"""Saved activations in a few bits an element: which may be, and the ops that do it.

In reading order: ``compression``, ``compressible_values``.
"""
