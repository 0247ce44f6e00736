"""Compressed gradient communication: the largest entries (deep gradient compression), or factors of low rank.

In comes a program with gradients; accumulation, selection and exchange are put in. Start with ``sparse_exchange``. In
reading order: ``sparse_exchange``, ``sparse_update``, ``optimizer_momentum``, ``low_rank_exchange``.
"""
