"""Configurations in the words of DeepSpeed and of Paddle, as passes.

>>> config = {"activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True}}
>>> model = graphopt.optimize(model, graphopt.configs.from_deepspeed(config, checkpoints="blocks.*"))
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError, did_you_mean
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.registry import find_pass

__all__ = ["from_deepspeed", "from_paddle"]

logger = logging.getLogger(__name__)

_DEEPSPEED: dict[str, Any] = {
    "partition_activations": False,
    "cpu_checkpointing": False,
    "contiguous_memory_optimization": False,
    "number_checkpoints": None,
    "synchronize_checkpoint_boundary": False,
    "profile": False,
}
"""The fields of DeepSpeed's section and their defaults."""

_PADDLE: dict[str, Any] = {"checkpoints": [], "enable_offload": False, "checkpoint_shape": []}
"""The fields of Paddle's section and their defaults."""


def from_deepspeed(
    config: Mapping[str, Any] | str | Path,
    *,
    checkpoints: str | Sequence[str] = "auto",
    group: str = "",
) -> list[Pass]:
    """The passes that do what a DeepSpeed configuration asks for under ``activation_checkpointing``.

    ========================================= ==============================================================
    field                                     what becomes of it
    ========================================= ==============================================================
    ``partition_activations``                 ``PartitionCheckpoints``
    ``cpu_checkpointing``                     ``Offload``, of the slices where checkpoints are partitioned
    ``number_checkpoints``                    with ``checkpoints="auto"``: so many, spread evenly
    ``synchronize_checkpoint_boundary``       ``CheckpointBoundaries(synchronize=True)``
    ``profile``                               ``CheckpointBoundaries(profile=True)``
    ``contiguous_memory_optimization``        ``ContiguousCheckpoints``, of the slices that stay on the device
    ========================================= ==============================================================

    What is not honoured is named in a warning of the logger ``graphopt``.

    Args:
        config: a configuration or the path of its JSON file: whole (its other sections are not read), or the section
            alone.
        checkpoints: what DeepSpeed's configuration does not say, since there the model's code calls ``checkpoint``:
            names or globs as for ``Recompute``, or ``"auto"``.
        group: name of the model-parallel process group; empty for the default group.

    Raises:
        GraphoptError: for a file that is not there or not JSON, an unknown field (with the nearest ones), a value of
            another type, and what DeepSpeed refuses too: ``contiguous_memory_optimization`` without
            ``partition_activations`` and ``number_checkpoints``. All problems at once.

    Example:
        >>> config = {"activation_checkpointing": {"cpu_checkpointing": True}}
        >>> graphopt.configs.from_deepspeed(config, checkpoints="blocks.*")
        [Recompute(checkpoints=('blocks.*',)), Offload(...)]
    """
    section = _section(_read(config), "activation_checkpointing", "DeepSpeed")
    problems = _unknown(section, _DEEPSPEED)
    values = {**_DEEPSPEED, **{key: value for key, value in section.items() if key in _DEEPSPEED}}
    number = values["number_checkpoints"]
    problems += [
        f"{key} is true or false, got {values[key]!r}"
        for key in _DEEPSPEED
        if key != "number_checkpoints" and not isinstance(values[key], bool)
    ]
    if number is not None and (isinstance(number, bool) or not isinstance(number, int) or number < 1):
        problems.append(f"number_checkpoints is null or a number of at least 1, got {number!r}")
    if values["contiguous_memory_optimization"] is True:
        problems += [
            f"contiguous_memory_optimization needs {key}, as in DeepSpeed"
            for key in ("partition_activations", "number_checkpoints")
            if not values[key]
        ]
    _raise(problems, "activation_checkpointing")
    passes = [_recompute(checkpoints, number)]
    if values["partition_activations"]:
        passes.append(_make("partition-checkpoints", group=group, min_bytes=0))
    if values["cpu_checkpointing"]:
        passes.append(_make("offload", min_bytes=0))
    if values["contiguous_memory_optimization"]:
        passes.append(_make("contiguous-checkpoints"))
    if values["synchronize_checkpoint_boundary"] or values["profile"]:
        synchronize, profile = values["synchronize_checkpoint_boundary"], values["profile"]
        passes.append(_make("checkpoint-boundaries", synchronize=synchronize, profile=profile))
    return passes


def from_paddle(config: Mapping[str, Any] | str | Path) -> list[Pass]:
    """The passes that do what Paddle's ``recompute_configs`` asks for.

    ``checkpoints`` become ``Recompute``, ``enable_offload`` becomes ``Offload``. ``checkpoint_shape`` is not needed,
    since the capture knows the shapes; a warning of the logger ``graphopt`` says so. With ``recompute`` false there is
    nothing to do, as in Paddle.

    Args:
        config: a strategy with ``recompute`` and ``recompute_configs`` or the path of its JSON file, or the section
            alone. Other fields of a strategy are not read.

    Raises:
        GraphoptError: for a file that is not there or not JSON, an unknown field (with the nearest ones), a value of
            another type, no checkpoints, and a ``checkpoint_shape`` with a size below 1, which Paddle refuses too. All
            problems at once.

    Example:
        >>> config = {"recompute_configs": {"checkpoints": ["net.0", "net.1"], "enable_offload": True}}
        >>> graphopt.configs.from_paddle(config)
        [Recompute(checkpoints=('net.0', 'net.1')), Offload(...)]
    """
    whole = _read(config)
    others = [key for key, value in whole.items() if key not in ("recompute", "recompute_configs", *_PADDLE) and value]
    if others and "recompute" in {*whole, *others}:
        _tell_left_out(others)
        whole = {key: value for key, value in whole.items() if key not in others}
    if whole.get("recompute") is False:
        logger.warning("recompute is false, so recompute_configs is not read, as in Paddle")
        return []
    section = _section(
        {key: value for key, value in whole.items() if key != "recompute"}, "recompute_configs", "Paddle"
    )
    problems = _unknown(section, _PADDLE)
    values = {**_PADDLE, **{key: value for key, value in section.items() if key in _PADDLE}}
    names, shape = values["checkpoints"], values["checkpoint_shape"]
    if not _all(names, str) or not names:
        problems.append(f"checkpoints is a list of names of tensors, with at least one, got {names!r}")
    if not isinstance(values["enable_offload"], bool):
        problems.append(f"enable_offload is true or false, got {values['enable_offload']!r}")
    if not _all(shape, int) or any(size < 1 for size in shape):
        problems.append(f"checkpoint_shape is a list of sizes of at least 1, got {shape!r}")
    _raise(problems, "recompute_configs")
    if shape:
        logger.warning("checkpoint_shape is not needed, and not read: the capture knows the shapes of checkpoints")
    passes = [_make("recompute", checkpoints=tuple(names))]
    if values["enable_offload"]:
        passes.append(_make("offload", min_bytes=0))
    return passes


_INSTEAD = {
    "amp": "MixedPrecision",
    "dgc": "DeepGradientCompression",
    "localsgd": "LocalSGD",
    "adaptive_localsgd": "AdaptiveLocalSGD",
    "sharding": "ShardOptimizer",
}
"""The passes that do what other switches of a strategy ask for."""


def _tell_left_out(fields: Sequence[str]) -> None:
    """Name every field of a strategy that is not honoured, with the pass to give for it."""
    instead = [f"{_INSTEAD[name]}(...) for {name}" for name in fields if name in _INSTEAD]
    advice = f"; give {', '.join(instead)}" if instead else ""
    logger.warning("from_paddle reads recompute and recompute_configs, not %s%s", ", ".join(fields), advice)


# --- reading ---------------------------------------------------------------------------------------------------------


def _read(config: Mapping[str, Any] | str | Path) -> Mapping[str, Any]:
    if isinstance(config, Mapping):
        return config
    path = Path(config)
    if not path.is_file():
        raise GraphoptError(f"there is no file {str(path)!r}; give the path of a JSON file, or a mapping")
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise GraphoptError(f"{str(path)!r} is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise GraphoptError(f"{str(path)!r} holds a {type(found).__name__}, and must hold an object")
    return found


def _section(config: Mapping[str, Any], name: str, owner: str) -> Mapping[str, Any]:
    """The section of a whole configuration; a configuration without it is taken for the section itself."""
    if name not in config:
        return config
    section = config[name]
    if not isinstance(section, Mapping):
        raise GraphoptError(f"{name} must hold an object, got {section!r}")
    others = [key for key in config if key != name]
    if others:
        logger.info("of the %s configuration only %s is read, not %s", owner, name, ", ".join(map(str, others)))
    return section


def _unknown(section: Mapping[str, Any], known: Mapping[str, Any]) -> list[str]:
    found = []
    for key in section:
        if key not in known:
            hint = did_you_mean(str(key), known) or f"its fields are {', '.join(known)}"
            found.append(f"there is no field {key!r}; {hint}")
    return found


def _all(value: object, kind: type) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(v, kind) and not isinstance(v, bool) for v in value)


def _raise(problems: Sequence[str], section: str) -> None:
    if problems:
        raise GraphoptError("\n  ".join([f"{section} is not right:", *problems]))


# --- making passes ---------------------------------------------------------------------------------------------------


def _make(name: str, **options: Any) -> Pass:
    return find_pass(name)(**options)


def _recompute(checkpoints: str | Sequence[str], number: int | None) -> Pass:
    if number is None:
        return _make("recompute", checkpoints=checkpoints)
    if checkpoints == "auto":
        return _make("recompute-evenly", number=number)
    logger.warning("number_checkpoints is not honoured: checkpoints= names them")
    return _make("recompute", checkpoints=checkpoints)
