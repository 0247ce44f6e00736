"""Ops of the update: list ops, momentum outside of an optimizer, loss scaling, and optimizers that are not traced.

In reading order: ``foreach``, ``momentum``, ``scale``, ``whole_parameter``, ``opaque_update``.
"""
