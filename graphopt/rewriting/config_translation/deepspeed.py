"""DeepSpeed's configurations as passes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.ir.files.checked_json import Field
from graphopt.rewriting.config_translation import deepspeed_fields as known
from graphopt.rewriting.config_translation.batch_sizes import batch_sizes
from graphopt.rewriting.config_translation.config_document import configuration
from graphopt.rewriting.config_translation.deepspeed_precision import mixed_precision
from graphopt.rewriting.config_translation.optimizer_call import optimizer_call
from graphopt.rewriting.config_translation.translation import (
    Findings,
    Section,
    Translation,
    make,
    number_of_ranks,
)
from graphopt.rewriting.pass_ import Pass

__all__ = ["from_deepspeed"]

_BYTES = 4
"""Of an element of a gradient, of which DeepSpeed counts elements and buckets here bytes."""

_STAGES = 3


def from_deepspeed(
    config: Mapping[str, Any] | str | Path,
    *,
    checkpoints: str | Sequence[str] = "auto",
    group: str = "",
    ranks: int | None = None,
) -> Translation:
    """The passes that do what a DeepSpeed configuration asks for.

    ========================================= ==============================================================
    field                                     what becomes of it
    ========================================= ==============================================================
    ``fp16``, ``bf16``                        ``MixedPrecision`` at level ``O2``, with the options of scaling
    ``amp``, ``torch_autocast``               ``MixedPrecision``
    ``gradient_clipping``                     ``ClipGradients``
    ``gradient_accumulation_steps``           ``accumulate`` of the result, as what follows from the batch sizes
    ``zero_optimization``                     ``DataParallel``, ``ShardOptimizer``; at stage 3 ``ShardParameters``
    ``communication_data_type``               ``CompressGradients``
    under ``activation_checkpointing``:
    ``partition_activations``                 ``PartitionCheckpoints``
    ``cpu_checkpointing``                     ``Offload``, of the slices where checkpoints are partitioned
    ``number_checkpoints``                    with ``checkpoints="auto"``: so many, spread evenly
    ``synchronize_checkpoint_boundary``       ``CheckpointBoundaries(synchronize=True)``
    ``profile``                               ``CheckpointBoundaries(profile=True)``
    ``contiguous_memory_optimization``        ``ContiguousCheckpoints``, of the slices that stay on the device
    ========================================= ==============================================================

    ``DataParallel`` is also there where several ranks train. Every other field is named in ``notes`` of the result with
    the reason, and where it asks for something that is not done, in a warning of the logger ``graphopt``; optimizer and
    scheduler are written there as calls of torch.

    Args:
        config: a configuration, or the path of its JSON, TOML or YAML file; or ``activation_checkpointing`` alone.
        checkpoints: what DeepSpeed's configuration does not say, since there the model's code calls ``checkpoint``:
            names or globs as for ``Recompute``, or ``"auto"``.
        group: name of the model-parallel process group; empty for the default group.
        ranks: how many ranks share a batch; by default as many as the process group has.

    Raises:
        GraphoptError: for a file that cannot be read, an unknown field (with the nearest ones), a value of another type
            or out of range, batch sizes that do not fit together, and what DeepSpeed refuses too, such as ``fp16`` and
            ``bf16`` together. All problems at once, with their paths.

    Example:
        >>> config = {"activation_checkpointing": {"cpu_checkpointing": True}}
        >>> graphopt.configs.from_deepspeed(config, checkpoints="blocks.*")
        [Recompute(checkpoints=('blocks.*',)), Offload(...)]
        >>> found = graphopt.configs.from_deepspeed({"bf16": {"enabled": True}, "zero_optimization": {"stage": 1}})
        >>> str(graphopt.Pipeline(found))
        'mixed-precision{level=O2},data-parallel,shard-optimizer'
    """
    ranks = number_of_ranks(ranks)
    document = configuration(config)
    alone = set(document) <= set(known.ACTIVATIONS)
    whole = {"activation_checkpointing": document} if alone else document
    findings = Findings()
    section = Section(Field(whole), known.CONFIG, findings, auto=True)
    passes = _activations(section, findings, checkpoints, group, alone=alone)
    passes += mixed_precision(section, findings)
    passes += _exchange(section, findings, ranks or 1)
    if section["gradient_clipping"]:
        passes.append(make("clip-gradients", max_norm=section.use("gradient_clipping")))
    section.note("gradient_clipping", "is 0, and nothing is clipped")
    accumulate = batch_sizes(section, findings, ranks)
    _optimizer(section, findings)
    section.settle()
    return findings.finish("activation_checkpointing" if alone else "DeepSpeed's configuration", passes, accumulate)


# --- activation checkpointing ----------------------------------------------------------------------------------------


def _activations(
    config: Section, findings: Findings, checkpoints: str | Sequence[str], group: str, *, alone: bool
) -> list[Pass]:
    """Recomputation, and what becomes of its checkpoints."""
    name = "activation_checkpointing"
    if name not in config:
        return []
    found = config.field(name) if not alone else Field(config.use(name), "$")
    section = Section(found, known.ACTIVATIONS, findings, auto=True)
    if section["contiguous_memory_optimization"]:
        for needed in ("partition_activations", "number_checkpoints"):
            if not section[needed]:
                section.problem("contiguous_memory_optimization", f"needs {needed}, as in DeepSpeed")
    passes = [_recompute(section, checkpoints)]
    for field, pass_name, options in (
        ("partition_activations", "partition-checkpoints", {"group": group, "min_bytes": 0}),
        ("cpu_checkpointing", "offload", {"min_bytes": 0}),
        ("contiguous_memory_optimization", "contiguous-checkpoints", {}),
    ):
        if section[field]:
            section.use(field)
            passes.append(make(pass_name, **options))
    synchronize, profile = section["synchronize_checkpoint_boundary"], section["profile"]
    if synchronize or profile:
        section.use("synchronize_checkpoint_boundary")
        section.use("profile")
        passes.append(make("checkpoint-boundaries", synchronize=synchronize, profile=profile))
    section.settle()
    return passes


def _recompute(section: Section, checkpoints: str | Sequence[str]) -> Pass:
    number = section["number_checkpoints"]
    if number is not None and checkpoints == "auto":
        section.use("number_checkpoints")
        return make("recompute-evenly", number=number)
    section.warn("number_checkpoints", "checkpoints= names them")
    return make("recompute", checkpoints=checkpoints)


# --- several ranks ---------------------------------------------------------------------------------------------------


def _exchange(config: Section, findings: Findings, ranks: int) -> list[Pass]:
    """The exchange of gradients, in which dtype, and whether the update is sharded."""
    zero = _zero_section(config, findings)
    stage, asked = zero["stage"], "zero_optimization" in config
    options: dict[str, Any] = {}
    if stage > _STAGES:
        zero.problem("stage", f"expected a stage from 0 to {_STAGES}, found {stage}")
    if "reduce_bucket_size" in zero:
        options["bucket_mb"] = zero.use("reduce_bucket_size") * _BYTES / 2**20
    if stage == _STAGES - 1:
        zero.warn("stage", "gradients are scattered as buckets are complete; those that are accumulated are whole")
    zero.note("stage", "is what shard-optimizer and shard-parameters do" if stage else "is 0: nothing is sharded")
    sharded = _sharding(zero, stage)
    elsewhere = _offload(zero, findings)
    zero.settle()
    compressed = _compressed(config, sharded=bool(sharded))
    needed = asked or compressed or ranks > 1
    return [*([make("data-parallel", **options)] if needed else []), *sharded, *elsewhere, *compressed]


def _sharding(zero: Section, stage: int) -> list[Pass]:
    """What each rank keeps a part of."""
    if stage < _STAGES:
        return [make("shard-optimizer")] if stage else []
    if known.PERSISTENCE not in zero:
        return [make("shard-parameters")]
    elements = zero.use(known.PERSISTENCE)
    return [make("shard-parameters", min_bytes=elements * _BYTES)]


def _zero_section(config: Section, findings: Findings) -> Section:
    """``zero_optimization``, which may be true or false alone."""
    name = "zero_optimization"
    value = config.use(name)
    if isinstance(value, bool):
        findings.note(f"{name} is {str(value).lower()}, which stands for stage {int(value)}")
        value = {"stage": int(value)} if value else {}
    elif value == {}:
        findings.note(f"{name} is empty: stage 0") if name in config else None
    return Section(Field(value, f"$.{name}"), known.ZERO, findings, auto=True)


def _offload(zero: Section, findings: Findings) -> list[Pass]:
    """What resides on the host or a disk."""
    parameters = Section(zero.field("offload_param"), known.OFFLOAD, findings, auto=True)
    if parameters["device"] != "none":
        parameters.warn("device", "offload-state moves parameters of models on a CPU only: what=optimizer,parameters")
    parameters.note("device", "is none, and nothing waits elsewhere")
    parameters.settle()
    state = Section(zero.field("offload_optimizer"), known.OFFLOAD, findings, auto=True)
    device = state.use("device") if "device" in state else "none"
    if zero["cpu_offload"]:
        zero.use("cpu_offload")
        device = "cpu" if device == "none" else device
    state.settle()
    return [] if device == "none" else [make("offload-state", tier="disk" if device == "nvme" else "host")]


def _compressed(config: Section, *, sharded: bool) -> list[Pass]:
    name = "communication_data_type"
    how = config[name]
    if how in ("fp16", "bf16") and sharded:
        config.warn(name, "compress-gradients does not go together with shard-optimizer")
        return []
    if how in ("fp16", "bf16"):
        config.use(name)
        return [make("compress-gradients", how=how)]
    config.note(name, "is what is done: gradients travel in their own dtype")
    return []


# --- optimizer and scheduler -----------------------------------------------------------------------------------------


def _optimizer(config: Section, findings: Findings) -> None:
    """Say how to write the optimizer and the scheduler, which are given to a step and not made by passes."""
    for name in ("optimizer", "scheduler"):
        if not config[name]:
            continue
        section = Section(config.field(name), known.OPTIMIZER, findings)
        kind, params = section.use("type"), section.use("params")
        section.settle()
        try:
            call = optimizer_call(kind, params) if name == "optimizer" else f"make {kind!r} with {dict(params)}"
        except GraphoptError as error:
            findings.problems.append(f"$.{name}: {error}")
            continue
        findings.warn(f"{name} is not honoured by passes: {call}")
