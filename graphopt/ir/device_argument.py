"""A device as users give it: as a ``torch.device`` or as text."""

from __future__ import annotations

import torch

from graphopt.errors import did_you_mean, wrong_argument

__all__ = ["device_argument"]

_KINDS = ("cpu", "cuda", "mps", "xpu", "meta")
_ALIASES = {"gpu": "cuda", "nvidia": "cuda", "host": "cpu"}


def device_argument(argument: str, value: object) -> torch.device:
    """The device that an argument names.

    Args:
        argument: its name, with its owner.
        value: what it got.

    Raises:
        ArgumentError: for what is no device, with the near names.
    """
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        try:
            return torch.device(value)
        except RuntimeError:
            kind, colon, index = value.lower().partition(":")
            meant = _ALIASES.get(kind)
            hint = f"did you mean {meant + colon + index!r}?" if meant else did_you_mean(kind, _KINDS)
            raise wrong_argument(argument, value, "a device, such as 'cpu' or 'cuda:0'", hint) from None
    hint = f"write 'cuda:{value}' for that GPU" if isinstance(value, int) and not isinstance(value, bool) else ""
    raise wrong_argument(argument, value, "a device, such as 'cpu' or 'cuda:0'", hint)
