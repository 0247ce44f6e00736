"""Ranks that are watched: where each is, whether it is alive, and which are at fault.

In reading order: ``watch``, ``heartbeat``, ``places``, ``messages``, ``diagnosis``, ``stalls``, ``agreement``,
``exchange_plan``.
"""
