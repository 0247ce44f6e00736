"""Pipelines in files, and configurations in the words of DeepSpeed and of Paddle, as passes; public as ``configs``.

>>> config = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
>>> model = graphopt.optimize(model, graphopt.configs.from_deepspeed(config, checkpoints="blocks.*"))

In reading order: ``translation``, ``config_file``, ``config_document``, ``deepspeed``, ``deepspeed_fields``,
``deepspeed_precision``, ``paddle``, ``paddle_fields``, ``optimizer_call``, ``batch_sizes``.
"""

from __future__ import annotations

from graphopt.rewriting.config_translation.config_file import load, save
from graphopt.rewriting.config_translation.deepspeed import from_deepspeed
from graphopt.rewriting.config_translation.paddle import from_paddle
from graphopt.rewriting.config_translation.translation import Translation

__all__ = ["Translation", "from_deepspeed", "from_paddle", "load", "save"]
