"""Loops that others own: Trainers of transformers and Lightning, and Accelerate. Each needs its library installed.

In reading order: ``transformers``, ``trainer_settings``, ``trainer_batches``, ``accelerate``, ``lightning``.
"""
