"""One call of a model or of a loss: its arguments, its results, and what is refused before anything is traced.

In come what the user passes and what comes back, nested; out come flat tensors, the axes that vary, and the line
something comes from. Start with ``flatten``. In reading order: ``flatten``, ``call_checks``, ``tensor_classes``,
``local_parameters``, ``sharded_form``, ``tensor_parallel_form``, ``varying_axes``, ``assigned_buffers``,
``batch_rows``, ``source_lines``, ``without_memory``, ``garbage_collection``.
"""
