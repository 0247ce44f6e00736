"""Configurations in the words of DeepSpeed and of Paddle; they live in ``graphopt.configs``."""

from graphopt.rewriting.config_translation import from_deepspeed as from_deepspeed
from graphopt.rewriting.config_translation import from_paddle as from_paddle

__all__ = ["from_deepspeed", "from_paddle"]
