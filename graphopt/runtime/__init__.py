"""Running programs: binding inputs, compiling, the drop-in module and the training step.

In reading order: ``runner``, ``compiled_joint``.
"""
