"""Captures for a device that is not here: copies without data, from which the same program is captured.

In come a model, its optimizer and a batch; out come copies on ``meta``, with what a trace needs to know. Start with
``for_device``. In reading order: ``for_device``, ``example_copies``, ``meta_tensors``.
"""
