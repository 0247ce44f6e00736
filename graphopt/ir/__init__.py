"""What a program is: the graph, names, state, invariants, its readable form, and the ops that passes insert.

In reading order: ``program``, ``node``, ``phases``, ``names``, ``state``, ``context``, ``verify``, ``lowering``,
``gradients``, ``region_effects``, ``program_arguments``, ``host``, ``version``.
"""
