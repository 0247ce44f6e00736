"""Ops of gradient communication: collectives, sparse and low-rank exchange, and the groups of ranks they run in.

Each is registered with torch, with a fake implementation, and runs over gloo or NCCL. Start with ``collectives``. In
reading order: ``collectives``, ``groups``, ``ring``, ``exchange_thread``, ``same_on_all_ranks``, ``selection``,
``sparse``, ``residual``, ``low_rank``, ``unreduced_gradient``.
"""
