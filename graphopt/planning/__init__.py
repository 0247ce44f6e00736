"""The planner: what to keep, recompute and move so that a program fits into a number of bytes, on plain data.

Nothing here knows torch. A ``Problem`` is operations in a fixed order with seconds and bytes; a ``Plan`` is the steps that
run it, with operations run again and values moved out and back; ``simulate`` says what a plan takes, to the byte.
"""

from graphopt.planning.problem import InvalidPlanError, Operation, Plan, Problem, Simulated, simulate

__all__ = ["InvalidPlanError", "Operation", "Plan", "Problem", "Simulated", "simulate"]
