"""Mixed precision: which ops run in which dtype, the casts that make it so, and what keeps small gradients alive."""

from graphopt.precision.casts import parameter_casts as parameter_casts
from graphopt.precision.policy import autocast_lists as autocast_lists

__all__ = ["autocast_lists", "parameter_casts"]
