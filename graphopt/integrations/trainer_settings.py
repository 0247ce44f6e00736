"""Which settings of a transformers Trainer a whole step follows: those that become passes, and those it refuses."""

from __future__ import annotations

import logging
from typing import Any

import torch
from torch import nn

from graphopt.errors import GraphoptError
from graphopt.integrations.accelerate import make_pass, scaling_passes
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.runtime.drop_in.module import Optimized

__all__ = ["is_scaled", "passes_of", "refuse_model", "refuse_settings", "tell_callbacks"]

logger = logging.getLogger("graphopt")

_DROP_IN = "hand graphopt.optimize(model, passes) to transformers.Trainer, which keeps its own loop"
_CLIP = "clip-gradients"


def refuse_settings(args: Any) -> None:
    """Refuse arguments of training whose work a whole step cannot take over.

    Args:
        args: ``transformers.TrainingArguments``; None for the defaults.

    Raises:
        GraphoptError: naming each of them, and what to do.
    """
    if args is None:
        return
    wrong = [
        f"{name}: {why}" for name, why in _REFUSED.items() if getattr(args, name, None) not in (None, False, "", [], {})
    ]
    if str(getattr(args, "optim", "")).lower().rpartition(".")[2] in ("lomo", "adalomo"):
        wrong.append("optim=lomo, adalomo: these update inside of backward")
    if getattr(args, "world_size", 1) > 1:
        wrong.append("several processes: Trainer wraps the model in DistributedDataParallel")
    elif getattr(args, "n_gpu", 1) > 1:
        wrong.append("several GPUs in one process: Trainer wraps the model in DataParallel (set CUDA_VISIBLE_DEVICES)")
    if wrong:
        raise GraphoptError(f"a whole step cannot follow these settings: {'; '.join(wrong)}\n  what to do: {_DROP_IN}")


_REFUSED = {
    "deepspeed": "its engine owns backward and the update",
    "fsdp": "it swaps parameters during the step",
    "torch_compile": 'it compiles the model by itself (give backend="inductor" to compile the step)',
    "use_liger_kernel": "its kernels replace the model's forward when training starts",
}


def refuse_model(model: nn.Module) -> None:
    """Refuse models that are optimized already, and those whose weights are quantized.

    Raises:
        GraphoptError: with what to do.
    """
    if isinstance(model, Optimized):
        raise GraphoptError(
            "the model is optimized already: give Trainer(passes=...) the bare model and all passes, or hand the "
            "optimized one to transformers.Trainer"
        )
    for path, module in model.named_modules():
        method = getattr(module, "quantization_method", None)
        kind = next((cls.__name__ for cls in type(module).__mro__ if cls.__module__.startswith("bitsandbytes")), None)
        if method is not None or kind is not None:
            name = f"the submodule {path!r}" if path else type(module).__name__
            raise GraphoptError(
                f"{name} has quantized weights ({getattr(method, 'value', method) or kind}), whose kernels are no ops "
                "that a program can hold: load the base in 16 bits (torch_dtype=torch.bfloat16), or leave graphopt out"
            )


def passes_of(trainer: Any, passes: Passes, budget: int | str | None) -> list[Pass]:
    """The passes of a trainer's step: those given, and what its settings ask for.

    Args:
        trainer: whose ``max_grad_norm`` and gradient scaler count.
        passes: as the user gave them.
        budget: for ``FitMemory``; None for none.

    Raises:
        GraphoptError: for a pass that is asked for twice.
    """
    given = list(Pipeline(passes).passes)
    names = {current.name for current in given}
    if budget is not None:
        if "fit-memory" in names:
            raise GraphoptError("budget= stands for the pass fit-memory, which is among the passes too: give one")
        given.append(make_pass("fit-memory", budget))
    limit = trainer.args.max_grad_norm
    if limit and _CLIP in names:
        raise GraphoptError(f"clip-gradients is among the passes, and max_grad_norm={limit} clips too: set it to 0")
    without = _CLIP in names or any(_CLIP in current.conflicts for current in given)
    if limit or not without:
        norm = limit if limit else float("inf")
        given.append(make_pass(_CLIP, norm, keep_norm=True))
    return given + scaling_passes(trainer.accelerator.scaler)


def tell_callbacks(trainer: Any, base: type) -> None:
    """Warn of callbacks that act between gradients and update, which is inside of the step."""
    for callback in trainer.callback_handler.callbacks:
        if getattr(type(callback), "on_pre_optimizer_step", None) is not getattr(base, "on_pre_optimizer_step", None):
            logger.warning(
                "%s.on_pre_optimizer_step is called behind the update: a whole step has no gradients in .grad",
                type(callback).__name__,
            )


def is_scaled(trainer: Any, items: torch.Tensor | int | None) -> bool:
    """Whether the loss that a trainer computes is one of all batches of an update already.

    Args:
        trainer: of transformers.
        items: how many there are to predict in these batches, where that is known.
    """
    said = getattr(trainer, "loss_is_scaled_for_ga", None)
    if said is not None:
        return bool(said)
    return bool(trainer.model_accepts_loss_kwargs and items is not None) or trainer.compute_loss_func is not None
