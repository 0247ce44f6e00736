"""From a capture to a program that is ready: passes run, inputs bound, results compared.

In comes a capture; out comes a rewritten program and where its inputs come from. Start with ``rewrite``. In reading
order: ``rewrite``, ``accumulate``, ``binding``, ``missing_gradients``, ``check_numerics``, ``host_reservation``.
"""
