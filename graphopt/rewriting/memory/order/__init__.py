"""Fewer bytes for no time: calls of backward and of the update in another order, or in place.

In comes a program; out comes one that gives the same bits with a lower peak. ``fit/preparation.py`` calls the first
four of them; the last one, behind all passes, trades bytes for time. In reading order: ``backward_order``,
``early_updates``, ``copied_stacks``, ``loss_in_place``, ``overlapped_exchanges``.
"""
