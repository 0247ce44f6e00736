"""Which program serves a call: by its signature, for its sizes, one that there is or a new one.

In comes a call; out comes a capture, made if need be. Start with ``serving``. In reading order: ``serving``,
``captures``, ``size_rules``, ``varying_sizes``, ``changing_sizes``, ``changing_values``, ``observers``.
"""
