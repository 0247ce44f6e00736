"""Mixed precision: which ops run in which dtype, the casts that make it so, and what keeps small gradients alive.

In reading order: ``cast_insertion``, ``casts``, ``autocast_rules``, ``autocast_regions``, ``written_casts``,
``op_selection``, ``levels``, ``options``, ``scaling``, ``conditional``, ``master_weights``, ``kernels``, ``devices``,
``float8_products``.
"""

from graphopt.rewriting.precision.autocast_rules import autocast_lists as autocast_lists
from graphopt.rewriting.precision.casts import parameter_casts as parameter_casts

__all__ = ["autocast_lists", "parameter_casts"]
