"""Forward and backward program + optimizer → step program.

In come a joint program and a ``torch.optim`` object; out comes a program with the update, traced from the optimizer
itself or as one opaque call. Start with ``traced_update``. In reading order: ``traced_update``, ``optimizer_tracer``,
``update_on_shards``, ``update_settings``, ``append_update``, ``opaque``.
"""
