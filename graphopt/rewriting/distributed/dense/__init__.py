"""All-reduces of gradients: put in, fused into buckets, started early, and taken out again.

In comes a program; it is rewritten. Start with ``all_reduce``. In reading order: ``all_reduce``, ``buckets``,
``remove_all_reduce``.
"""
