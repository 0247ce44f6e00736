"""The planner: what to keep, recompute and move so that a program fits into a number of bytes, on plain data.

Nothing here knows torch. A ``Problem`` is operations in a fixed order with seconds and bytes; a ``Plan`` is the steps
that run it, with operations recomputed; ``simulate`` says what a plan takes, to the byte. ``find_frontier`` gives the
trade between bytes and seconds, ``plan`` the best plan for a budget.

In reading order: ``problem``, ``planner``, ``frontier``, ``planner_arguments``.
"""

from graphopt.planning.frontier import Frontier, Point
from graphopt.planning.planner import InfeasibleError, find_frontier, plan
from graphopt.planning.problem import InvalidPlanError, Operation, Plan, Problem, Simulated, simulate

__all__ = [
    "Frontier",
    "InfeasibleError",
    "InvalidPlanError",
    "Operation",
    "Plan",
    "Point",
    "Problem",
    "Simulated",
    "find_frontier",
    "plan",
    "simulate",
]
