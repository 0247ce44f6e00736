"""What a pass is, and what passes are built from.

In reading order: ``pass_``, ``pass_type``, ``training_pass``, ``pipeline``, ``pipeline_file``, ``registry``,
``instruments``, ``dump``, ``progress``, ``warnings_kept``, ``shards``, ``gradient_norm``.
"""
