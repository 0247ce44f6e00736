"""Passes from functions: a pattern and its replacement, or any function on a GraphModule.

In come functions of a user; out come passes. Start with ``rewrite_pass``. In reading order: ``rewrite_pass``,
``pattern``, ``fx_pass``.
"""
