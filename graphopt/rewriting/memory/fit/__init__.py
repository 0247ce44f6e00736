"""Bringing a program within a budget: problem → search → plan → the plan done to the program.

In come a program and a budget in bytes; the program is rewritten, and what was decided is data that other programs
and ranks are given. Start with ``memory_planner``. In reading order: ``memory_planner``, ``budget``, ``preparation``,
``fitting``, ``planned``, ``named_plan``, ``decision``, ``known_plans``, ``other_sizes``, ``plans_with_copies``,
``state_action``, ``compress_action``, ``summary``.
"""
