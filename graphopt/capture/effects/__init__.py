"""Side effects: what a model does beside computing tensors, which a program would lose.

In come a model and what it does while it is traced; out come errors and warnings with the line, or what a program has
to do in its place. Start with ``side_effects``. In reading order: ``side_effects``, ``state_changes``,
``tensor_effects``, ``external_effects``, ``changed_parameters``, ``returned_tensors``, ``checks``, ``eager_trial``.
"""
