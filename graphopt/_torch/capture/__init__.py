"""What tracing needs of torch: example values, symbolic sizes, and joint graphs of ``torch._functorch.aot_autograd``.

In come modules, tensors and optimizers of the user; out come graphs, and values without data to trace with.
``aot_autograd`` is where to start reading; the others are what it, and ``graphopt.capture``, need on the way. In
reading order: ``aot_autograd``, ``written_joint``, ``fake_tensors``, ``traced_tensors``, ``symbolic_sizes``,
``interception``, ``custom_functions``, ``autograd_engine``, ``real_writes``, ``optimizer_tracing``,
``generator_states``, ``export_regions``, ``second_derivatives``.
"""
