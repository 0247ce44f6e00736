"""Programs as text, Python, JSON, pictures, tables and differences.

In reading order: ``register``, ``interface``, ``notebook``, ``notebook_progress``.
"""
