"""Checkpoints of training, of one rank or of many: a folder in which each is whole or not there.

In come steps, models and optimizers; out come files that are read without executing anything. Start with
``checkpoint``. In reading order: ``checkpoint``, ``checkpoint_folder``, ``checkpoint_formats``, ``step_checkpoint``.
"""
