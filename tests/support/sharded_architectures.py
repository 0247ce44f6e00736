"""Tiny models of transformers in every wrapping, trained by torch and with programs, and how far apart they are."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import graphopt
from tests.support.architecture_trials import ARCHITECTURES
from tests.support.fully_sharded import by_mesh
from tests.support.zoo import own_loss

__all__ = ["MODELS", "WRAPPINGS", "apart"]

MODELS = ("LlamaForCausalLM", "Qwen3MoeForCausalLM", "ViTForImageClassification", "T5ForConditionalGeneration")

_COLUMNS = frozenset(
    ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "fc1", "q", "k", "v", "wi", "relative_attention_bias"]
)
_ROWS = frozenset(["o_proj", "down_proj", "fc2", "o", "wo"])


def _sharded(model: nn.Module, mesh: DeviceMesh | None = None, *, half: bool = False) -> nn.Module:
    options: dict[str, Any] = {} if mesh is None else {"mesh": mesh}
    if half:
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    stacks = [m for m in model.modules() if isinstance(m, nn.ModuleList) and len(m) > 1]
    inside: set[nn.Module] = set()
    for block in [block for stack in stacks for block in stack]:
        if block not in inside:
            fully_shard(block, **options)
            inside.update(block.modules())
    return fully_shard(model, **options)


def _parallel(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Heads and features over ranks, as the plans of these models in transformers have them."""
    for path, module in list(model.named_modules()):
        name = path.rpartition(".")[2]
        if isinstance(module, (nn.Linear, nn.Embedding)) and name in _COLUMNS | _ROWS:
            parallelize_module(module, mesh, ColwiseParallel() if name in _COLUMNS else RowwiseParallel())
        for attribute in ("num_attention_heads", "num_heads", "n_heads", "inner_dim", "all_head_size"):
            if hasattr(module, attribute) and not isinstance(module, transformers.PreTrainedModel):
                setattr(module, attribute, getattr(module, attribute) // mesh.size())
    return model


def _grid(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (dist.get_world_size() // 2, 2), mesh_dim_names=names)


def _both(model: nn.Module) -> nn.Module:
    mesh = _grid("shards", "parts")
    return _sharded(_parallel(model, mesh["parts"]), mesh["shards"])


WRAPPINGS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "DDP": DistributedDataParallel,
    "FSDP2": _sharded,
    "FSDP2, bfloat16": lambda model: _sharded(model, half=True),
    "HSDP": lambda model: _sharded(model, _grid("replicas", "shards")),
    "tensor parallel": lambda model: _parallel(model, _grid("replicas", "parts")["parts"]),
    "tensor parallel, FSDP2": _both,
}


def apart(name: str, wrapping: str, passes: str, *, step: bool, ranks_of_batch: int = 1) -> dict[str, Any]:
    """Train a model as torch does and with programs, and say what differs.

    Args:
        name: of ``MODELS``.
        wrapping: of ``WRAPPINGS``.
        passes: as text; ``smallest`` is ``FitMemory`` with the least that it names.
        step: as a whole step, else drop-in.
        ranks_of_batch: how many ranks have the same batch.

    Returns:
        the names of what differs, and the peak measured and predicted, of this rank.
    """
    logging.getLogger("graphopt").setLevel(logging.ERROR)
    transformers.logging.set_verbosity_error()
    passes = "fit-memory{budget=1% effort=thorough}" if passes == "smallest" else passes
    for _ in range(4):
        try:
            return _compared(name, WRAPPINGS[wrapping], passes, step, dist.get_rank() // ranks_of_batch)
        except graphopt.GraphoptError as error:
            least = re.findall(r"([\d.]+)% is the least", str(error))
            if not least:
                raise
            passes = f"fit-memory{{budget={least[0]}% effort=thorough}}"
    raise AssertionError(f"no budget is met: {passes}")


def _compared(name: str, wrap: Callable[[nn.Module], nn.Module], passes: str, step: bool, place: int) -> dict[str, Any]:
    """What ``apart`` returns, with passes that can be applied."""

    def made() -> tuple[Any, torch.optim.Optimizer, Any]:
        torch.manual_seed(0)
        model, batches = ARCHITECTURES[name].build(2)
        model = wrap(model)
        return model, torch.optim.AdamW(by_mesh(model), lr=0.01, fused=True), batches

    model, two, batches = made()
    run: Any = graphopt.optimize_step(model, two, passes or (), loss=own_loss) if step else None
    if not step:
        run = model = graphopt.optimize(model, passes or ())
    theirs, one, _ = made()
    differ = []
    for number in range(2):
        batch = batches[(number + place) % 2]
        torch.manual_seed(number)
        other = run(batch) if step else own_loss(run, batch)
        if not step:
            other.backward()
            two.step()
            two.zero_grad()
        torch.manual_seed(number)
        loss = own_loss(theirs, batch)
        loss.backward()
        one.step()
        one.zero_grad()
        differ += [] if torch.equal(loss.detach(), other.detach()) else ["loss"]
        differ += [
            key
            for (key, p), q in zip(theirs.named_parameters(), model.parameters(), strict=True)
            if not torch.equal(_whole(p), _whole(q))
        ]
    predicted = (run.module if isinstance(run, DistributedDataParallel) else run).program.memory().allocated_peak_bytes
    return {"differ": differ, "predicted": predicted, "measured": _measured(run, batches[place % 2], step, predicted)}


def _measured(run: Any, batch: Any, step: bool, predicted: int) -> int:
    """The peak of a call, the least of several: gloo's threads may let go of an exchange a moment late."""
    least = math.inf
    for _ in range(12):
        found = graphopt.measure_peak(lambda: run(batch) if step else own_loss(run, batch).backward())
        least = min(least, found.allocated_peak_bytes)
        near = torch.tensor(float(least <= predicted))
        dist.all_reduce(near, op=dist.ReduceOp.MIN)  # ranks exchange in calls, so that all make as many
        if near:
            break
    return int(least)


def _whole(value: Any) -> torch.Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value.detach()
