"""Models that are not one graph: torch's Dynamo cuts them, and each graph is captured and rewritten.

In comes a function or model; out come programs for its graphs, with eager code between them, and one budget for all.
Start with ``parts`` (``optimize``) or ``dynamo_backend`` (``torch.compile(backend="graphopt")``); both go through
``cut_graphs``. In reading order: ``parts``, ``dynamo_backend``, ``compile_options``, ``cut_graphs``, ``part_budget``,
``extra_guards``.
"""
