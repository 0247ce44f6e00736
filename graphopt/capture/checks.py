"""Models that must be given unwrapped."""

from __future__ import annotations

from torch import nn

from graphopt.errors import CaptureError

__all__ = ["refuse_wrapped"]

_WAY_OUT = {
    "OptimizedModule": "it is wrapped by torch.compile; pass the bare module (model._orig_mod) and choose "
    'backend="inductor" to compile the rewritten program',
    "DistributedDataParallel": "it is wrapped by DistributedDataParallel, whose reducer cannot be captured; pass the "
    "bare module (model.module) and exchange gradients outside of the program",
    "DataParallel": "it is wrapped by DataParallel, which runs replicas in threads; pass the bare module "
    "(model.module)",
    "FullyShardedDataParallel": "it is wrapped by FullyShardedDataParallel, which swaps parameters during the step; "
    "pass the bare module",
    "FSDPModule": "fully_shard was applied to it, which swaps parameters during the step; pass the module before "
    "fully_shard",
    "ScriptModule": "it is a TorchScript module, which has no Python to trace; pass the module it was made from",
}


def refuse_wrapped(model: object) -> None:
    """Raise a ``CaptureError`` with the way out for a model, or a part of one, that another tool has wrapped."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"expected an nn.Module, got {type(model).__name__}: {model!r}")
    for path, module in model.named_modules():
        for cls in type(module).__mro__:
            if cls.__name__ in _WAY_OUT and cls.__module__.startswith("torch."):
                where = f"its submodule {path!r}" if path else type(module).__name__
                raise CaptureError(f"{where} cannot be captured: {_WAY_OUT[cls.__name__]}")
