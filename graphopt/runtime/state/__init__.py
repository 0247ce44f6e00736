"""State between steps: of models, optimizers and passes, whole or in shards, in memory or in files.

In come tensors by name; out come state dicts, shards and folders. Start with ``state_dict``. In reading order:
``state_dict``, ``state_store``, ``state_versions``, ``random_streams``, ``packed_state``, ``lasting_folder``,
``sharded_model``, ``sharded_parameter``, ``sharded_model_state``, ``dtensor_state``, ``materialize_shards``.
"""
