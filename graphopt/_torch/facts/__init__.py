"""What torch knows of ops, dictionaries, graphs and allocators, and says in private alone.

Each file answers one kind of question and changes nothing. ``op_calls`` is the one that most others of the package
ask. In reading order: ``op_calls``, ``change_detection``, ``memory_profile``, ``graph_nodes``.
"""
