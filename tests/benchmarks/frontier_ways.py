"""The ways to train one model that memory_frontier.py compares: eager PyTorch, what PyTorch offers, and FitMemory."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch._dynamo
import torch._functorch.config
from frontier_models import Batch, WithLoss, Workload
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import graphopt
from graphopt.errors import GraphoptError
from graphopt.ir.names import match_names
from graphopt.passes import FitMemory
from graphopt.rewriting.memory.fit.budget import BudgetError

TORCH_BUDGETS = (1.0, 0.8, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.0)
QUICK_BUDGETS = (1.0, 0.4)
"""Values of ``activation_memory_budget``: all, and few."""

OURS: dict[str, str] = {"eager": "graphopt", "inductor": "graphopt, inductor"}
"""The series of FitMemory, by backend."""

_aten: Any = torch.ops.aten
ATTENTION = [
    _aten._scaled_dot_product_flash_attention_for_cpu.default,
    _aten._scaled_dot_product_flash_attention.default,
    _aten._scaled_dot_product_efficient_attention.default,
    _aten._scaled_dot_product_cudnn_attention.default,
]
PRODUCTS = [_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.convolution.default]


@dataclass(frozen=True)
class Setting:
    """One model with its batch on one device; every way uses the same parameters."""

    workload: Workload
    model: nn.Module
    batch: Batch
    device: torch.device

    @classmethod
    def of(cls, workload: Workload, device: torch.device, *, quick: bool) -> Setting:
        torch.manual_seed(0)
        model, batch = workload.make(quick)
        whole = WithLoss(model.train(), workload.loss).to(device)
        return cls(workload, whole, tuple(tensor.to(device) for tensor in batch), device)

    def fresh(self) -> nn.Module:
        """The model once more: modules and buffers of its own, the same parameters."""
        return copy.deepcopy(self.model, {id(p): p for p in self.model.parameters()})

    def clear(self) -> None:
        """Forget the gradients."""
        self.model.zero_grad(set_to_none=True)


@dataclass(frozen=True)
class Way:
    """One way to compute loss and gradients.

    Attributes:
        label: what it is called in tables.
        series: the line of the chart that it belongs to.
        module: is called with the batch and returns the loss.
        around: entered around forward.
        predicted: the peak that the memory model predicts, in bytes above persistent memory.
        note: what to know about the figures.
    """

    label: str
    series: str
    module: nn.Module
    around: Callable[[], AbstractContextManager[Any]] = nullcontext
    predicted: int | None = None
    note: str = ""

    def run(self, setting: Setting) -> torch.Tensor:
        """Forward and backward; gradients stay in ``.grad`` of the setting's parameters."""
        with self.around():
            loss: torch.Tensor = self.module(*setting.batch)
        loss.backward()  # type: ignore[no-untyped-call]
        if setting.device.type == "cuda":
            torch.cuda.synchronize(setting.device)
        return loss.detach()


Maker = tuple[str, str, Callable[[Setting], Way]]
"""A label, a series, and what makes the way; made late, since making can fail."""


def peers(budgets: Sequence[float], *, inductor: bool) -> Iterator[Maker]:
    """Eager PyTorch, which is the reference, and PyTorch's own ways to save memory."""
    yield "eager PyTorch", "eager", lambda s: Way("eager PyTorch", "eager", s.fresh())
    yield _checkpointed("checkpoint() per block", "checkpoint()", None)
    yield _checkpointed("selective, keeps sdpa", "selective", ATTENTION)
    yield _checkpointed("selective, keeps products", "selective", PRODUCTS + ATTENTION)
    for backend in ("aot_eager", "inductor") if inductor else ("aot_eager",):
        for budget in budgets:
            yield f"{backend}, budget {budget}", backend, functools.partial(_compiled, backend=backend, budget=budget)
    yield "save_on_cpu", "save_on_cpu", _saved_on_cpu


def _checkpointed(label: str, series: str, kept: Sequence[Any] | None) -> Maker:
    """``torch.utils.checkpoint`` around every block; ``kept`` are the ops whose results it keeps all the same."""

    def make(setting: Setting) -> Way:
        options: dict[str, Any] = {"use_reentrant": False}
        if kept is not None:
            options["context_fn"] = functools.partial(create_selective_checkpoint_contexts, list(kept))
        module = setting.fresh()
        for block in match_names(setting.workload.blocks, dict(module.named_modules()), "module").values():
            block.forward = functools.partial(checkpoint, block.forward, **options)
        return Way(label, series, module)

    return label, series, make


def _compiled(setting: Setting, *, backend: str, budget: float) -> Way:
    """``torch.compile`` with the budget that its partitioner takes, a share between 0 and 1 of what it would save.

    Each budget has a backend of its own: torch's cache of compiled code goes by backend, and does not know the budget.
    """
    inner = torch._dynamo.lookup_backend(backend)

    def compile_within_budget(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        with torch._functorch.config.patch(activation_memory_budget=budget):
            return inner(module, inputs)

    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 10_000
    module = torch.compile(setting.fresh(), backend=compile_within_budget, dynamic=False)
    return Way(f"{backend}, budget {budget}", backend, module)  # type: ignore[arg-type]


def _saved_on_cpu(setting: Setting) -> Way:
    note = "on a CPU, save_on_cpu() moves nothing: its peak means nothing" if setting.device.type == "cpu" else ""
    pinned = setting.device.type == "cuda"
    around = functools.partial(torch.autograd.graph.save_on_cpu, pin_memory=pinned)
    return Way("save_on_cpu", "save_on_cpu", setting.fresh(), around, note=note)


def resident_bytes(way: Way) -> int:
    """Bytes of parameters, buffers and batch, which a budget counts, by the program of a way of ours."""
    return _program(way.module).memory().resident_bytes


def unfitted(setting: Setting) -> Way:
    """``optimize`` without passes."""
    module = graphopt.optimize(setting.fresh(), example_inputs=setting.batch)
    return Way("optimize", "graphopt", module, predicted=_program(module).memory().allocated_peak_bytes)


def fitted(setting: Setting, budget: int, resident: int, label: str, backend: Literal["eager", "inductor"]) -> Way:
    """``optimize`` with ``FitMemory`` at ``budget`` bytes above the ``resident`` ones."""
    passes = [FitMemory(resident + budget)]
    module = graphopt.optimize(setting.fresh(), passes, example_inputs=setting.batch, backend=backend)
    return Way(label, OURS[backend], module, predicted=_program(module).memory().allocated_peak_bytes)


def _program(module: nn.Module) -> graphopt.Program:
    program: graphopt.Program = module.program  # type: ignore[assignment]
    return program


def smallest_budget(setting: Setting, resident: int) -> int:
    """The smallest peak that ``FitMemory`` finds, in bytes above the resident ones; its error holds it."""
    budget = resident + 256
    for _ in range(2):  # below what every plan takes nothing is searched
        try:
            graphopt.optimize(setting.fresh(), [FitMemory(budget)], example_inputs=setting.batch)
        except GraphoptError as error:
            if not isinstance(error.__cause__, BudgetError):
                raise
            budget = error.__cause__.smallest_bytes
            if error.__cause__.searched:
                return budget - resident
        else:
            break
    raise GraphoptError("a budget of what every plan takes above persistent memory was met: nothing is to be fitted")
