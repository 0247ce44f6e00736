"""Parameters, gradients and optimizer state of which each rank keeps a shard.

In comes a program; gathers and reduce-scatters are put in, and state is described rank by rank. Start with
``sharded_update``. In reading order: ``sharded_update``, ``whole_updates``, ``sharded_parameters``,
``low_precision_gathers``, ``accumulated_gradients``, ``sharded_state``, ``named_shards``.
"""
