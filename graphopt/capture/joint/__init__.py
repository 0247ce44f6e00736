"""Forward program → forward and backward program.

In comes a forward program; out comes one with backward, its gradients laid out as autograd leaves them, names and
lines carried across. Start with ``differentiation``; ``equal_blocks`` and ``stamped_joint`` have equal layers
differentiated once. In reading order: ``differentiation``, ``traced_joint``, ``traced_modules``, ``replace_ops``,
``device_kernels``, ``finish_joint``, ``split_uses``, ``equal_blocks``, ``traced_blocks``, ``stamped_joint``,
``replayed_trace``, ``specialization``.
"""
