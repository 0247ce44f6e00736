"""FX graphs below the program: copies, keys of ops, and calls under the caller's autocast.

In and out come graphs and nodes. Start with ``graph_copies``, which every ``Program.copy`` goes through. In reading
order: ``graph_copies``, ``autocast``.
"""
