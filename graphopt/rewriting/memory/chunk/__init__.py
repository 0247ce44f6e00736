"""A few rows at a time: which ops around a large value allow it, and how each is written for some rows.

In comes a program; out come regions of calls that can be computed in chunks, then the program with them. Start with
``chunk_rows``; the files of rules have one rule for each op. In reading order: ``chunk_rows``, ``row_regions``,
``module_regions``, ``batch_region``, ``token_rows``, ``row_rules``, ``view_rules``, ``product_rules``,
``layer_rules``, ``loss_rules``.
"""
