"""Searches for plans, each with its own method; ``planning.planner`` asks them.

In come a problem and budgets; out come plans on a frontier, and bounds that no plan beats. Start with ``aiming`` (one
budget) and ``ladder`` (all of them). In reading order: ``aiming``, ``ladder``, ``local_search``, ``refinement``,
``lowersets``, ``segments``, ``chain``, ``cuts``, ``milp``, ``lower_bound``.
"""
