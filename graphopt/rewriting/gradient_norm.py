"""The norm of all gradients, kept by a program for whoever logs it."""

from __future__ import annotations

import torch
from torch import fx

from graphopt.ir.node import value_of
from graphopt.ir.program import Program
from graphopt.ir.state import PassState

__all__ = ["GRADIENT_NORM", "norm_state"]

GRADIENT_NORM = "clip-gradients/norm"
"""The name of the tensor in which a step keeps it."""


def norm_state(program: Program, like: fx.Node) -> fx.Node:
    """The tensor that keeps the norm, as an input of a step program.

    Args:
        program: that computes it.
        like: a norm, which says dtype and device.
    """
    value = value_of(like)
    return program.add_state(GRADIENT_NORM, PassState((), torch.float32, value.device, saved=False))
