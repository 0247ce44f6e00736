"""Recomputation: which ops may run a second time, and a plan carried out with clones of them.

In come a program and a plan, or tensors marked for recomputation; the program is rewritten. Start with
``recompute_plan``; ``planning_problem`` makes the planner's plain data of a program. In reading order:
``planning_problem``, ``recompute_plan``, ``rematerialize``, ``replay``, ``checkpoint_segments``,
``gathered_parameters``.
"""
