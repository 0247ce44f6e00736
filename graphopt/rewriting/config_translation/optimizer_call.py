"""DeepSpeed's section ``optimizer`` as a call of torch, for people."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphopt.errors import GraphoptError

__all__ = ["optimizer_call"]

_TORCH = {"adam": "Adam", "adamw": "AdamW", "sgd": "SGD", "adagrad": "Adagrad", "muon": "Muon"}
"""Optimizers of torch, by DeepSpeed's names in lower case."""

_SWITCHES = ("torch_adam", "adam_w_mode", "max_grad_norm")
"""What DeepSpeed takes out of the parameters of an optimizer before it makes one."""


def optimizer_call(kind: str, params: Mapping[str, Any]) -> str:
    """How to make the optimizer with torch; the end of a sentence.

    Args:
        kind: DeepSpeed's name for it.
        params: what it is made with. ``"auto"`` is for the program that fills it in, and is named as such.

    Raises:
        GraphoptError: where no optimizer is named.
    """
    if not kind:
        raise GraphoptError("expected a type: the name of an optimizer")
    name = _TORCH.get(kind.lower())
    if name is None:
        return f"torch.optim has no {kind!r}; give optimize_step one with {dict(params)}"
    if name == "Adam" and params.get("adam_w_mode", True) is not False:
        name = "AdamW"  # which is DeepSpeed's default for its Adam
    given = {key: tuple(value) if isinstance(value, list) else value for key, value in params.items()}
    arguments = [f"{key}={value!r}" for key, value in given.items() if key not in _SWITCHES and value != "auto"]
    said = f"give optimize_step torch.optim.{name}({', '.join(['model.parameters()', *arguments])})"
    filled = [key for key, value in given.items() if value == "auto"]
    if filled:
        said += f", with {', '.join(filled)} for 'auto'"
    if params.get("max_grad_norm"):
        said += f"; max_grad_norm is gradient_clipping: {params['max_grad_norm']}"
    return said
