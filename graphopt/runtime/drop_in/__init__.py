"""``optimize``: a module that is used like the one it was made from.

In come a module and passes; out comes a module whose training calls run rewritten programs. Start with ``module``. In
reading order: ``module``, ``set_forward``, ``model_captures``, ``wrapped``, ``sharded_call``,
``largest_batch``, ``requirements``.
"""
