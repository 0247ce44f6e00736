"""A graph that torch's Dynamo has cut out of a model, captured like any other module.

In come a graph and its arguments; out come a module, a form of it that other processes recognise, and numbers as
tensors. Start with ``graph_part``. In reading order: ``graph_part``, ``open_numbers``.
"""
