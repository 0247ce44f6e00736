"""Ops for layers of models that torch has no single op for, or whose parts a program needs apart.

Each gives eager mode's bits. In reading order: ``dropout``, ``recurrent``, ``rms_norm``, ``softmax``,
``loss_gradient``.
"""
