"""A model that DistributedDataParallel wraps: what is inside is optimized, and the reducer stays the user's.

Gradients come from one node of autograd, all of them behind its whole backward, so that buckets are reduced then and
not beside it. Which buckets there are, hooks on them, ``no_sync``, ``join`` and a static graph stay as they are.
"""

from __future__ import annotations

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from graphopt.errors import PipelineError
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.precision.scaling import scaling_of

__all__ = ["around", "refuse_beside_sharding", "refuse_exchange"]


def refuse_exchange(pipeline: Pipeline, who: str) -> None:
    """Raise a ``PipelineError`` for a pass that exchanges gradients, where the model's wrapper does so already.

    Args:
        pipeline: the passes.
        who: has the model exchange them, for people.
    """
    for current in pipeline.passes:
        if "data-parallel" in (current.name, *current.requires):
            raise PipelineError(
                f"{current.name} exchanges gradients, and {who} exchange them already: leave the pass out"
            )


def refuse_beside_sharding(pipeline: Pipeline, title: str) -> None:
    """Raise a ``PipelineError`` for a pass that cannot act on a model that others have sharded.

    Args:
        pipeline: the passes.
        title: the model's class.
    """
    refuse_exchange(pipeline, f"what has sharded {title} has the ranks")
    if scaling_of(tuple(pipeline.passes)) is not None:
        raise PipelineError(
            "a pass scales the loss, and would check on each rank by itself whether gradients are finite, of which "
            f"each rank has a part, since {title} is sharded: use bfloat16, or torch.amp.GradScaler "
            "around the model"
        )


def around(given: DistributedDataParallel, inner: nn.Module, pipeline: Pipeline) -> DistributedDataParallel:
    """The same wrapper around another module with the same parameters.

    Args:
        given: is not changed, and shares its reducer with the result.
        inner: what the result calls.
        pipeline: its passes.

    Raises:
        PipelineError: for a pass that exchanges gradients.
    """
    refuse_exchange(pipeline, f"DistributedDataParallel has {type(inner).__name__}")
    made: DistributedDataParallel = object.__new__(type(given))
    object.__setattr__(made, "__dict__", {**vars(given), "_modules": {**given._modules, "module": inner}})
    return made
