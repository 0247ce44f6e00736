"""Pipelines in files, and configurations in other people's words; they live in ``graphopt.configs``."""

from graphopt.rewriting.config_translation import Translation as Translation
from graphopt.rewriting.config_translation import from_deepspeed as from_deepspeed
from graphopt.rewriting.config_translation import from_paddle as from_paddle
from graphopt.rewriting.config_translation import load as load
from graphopt.rewriting.config_translation import save as save

__all__ = ["Translation", "from_deepspeed", "from_paddle", "load", "save"]
