"""DeepSpeed's sections on precision as one pass."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.rewriting.config_translation import deepspeed_fields as known
from graphopt.rewriting.config_translation.translation import Findings, Known, Section, make
from graphopt.rewriting.pass_ import Pass

__all__ = ["mixed_precision"]


def mixed_precision(config: Section, findings: Findings) -> list[Pass]:
    """The pass that ``fp16``, ``bf16``, ``amp`` or ``torch_autocast`` asks for."""
    wanted: dict[str, dict[str, Any]] = {}
    for name, (fields, read) in _READERS.items():
        section = Section(config.field(name), fields, findings, auto=True)
        if section["enabled"]:
            section.use("enabled")
            wanted[name] = read(section, findings, name)
            section.settle()
        else:
            section.note("enabled", "is off, and so it is here")
            section.settle(off=f"{name} is not enabled")
    _data_types(config, findings)
    if len(wanted) > 1:
        findings.problems.append(f"{' and '.join(f'$.{name}' for name in wanted)} are both enabled: choose one of them")
        return []
    for name, options in wanted.items():
        try:
            return [make("mixed-precision", **options)] if options else []
        except GraphoptError as error:
            findings.problems.append(f"$.{name}: {error}")
    return []


def _data_types(config: Section, findings: Findings) -> None:
    section = Section(config.field("data_types"), known.DATA_TYPES, findings, auto=True)
    if section["grad_accum_dtype"] == "float32":
        section.note("grad_accum_dtype", "is what float32 gradients have")
    section.settle()


def _fp16(section: Section, findings: Findings, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": "float16", "level": "O2"}
    section.note("auto_cast", "is done by the pass: inputs are cast where an op reads them")
    if section["loss_scale"] > 0:
        for other in ("initial_scale_power", "loss_scale_window", "hysteresis", "consecutive_hysteresis"):
            section.warn(other, "loss_scale is not 0, and then the scale stays")
        section.warn("min_loss_scale", "loss_scale is not 0, and then the scale stays")
        return options | {"init_scale": section.use("loss_scale"), "dynamic": False}
    section.note("loss_scale", "is 0: the scale follows the gradients")
    power = section.use("initial_scale_power")
    if power > _LARGEST_POWER:
        section.problem("initial_scale_power", f"expected at most {_LARGEST_POWER}, found {power}")
        power = 0
    options |= {"init_scale": 2.0**power, "growth_interval": section.use("loss_scale_window")}
    options |= {"hysteresis": section.use("hysteresis")}
    if section["consecutive_hysteresis"]:
        section.note("consecutive_hysteresis", "is what the pass does")
    elif section["hysteresis"] > 1:
        section.use("consecutive_hysteresis")
        findings.warn(
            f"{name}.consecutive_hysteresis is not honoured: bad steps count in a row, as if it were true: the scale "
            "falls later where good steps are between bad ones"
        )
    if section["min_loss_scale"] > 0:
        options["floor"] = section.use("min_loss_scale")
    section.note("min_loss_scale", "is 0: the scale falls to the smallest normal number")
    return options


_LARGEST_POWER = 127


def _bf16(section: Section, findings: Findings, name: str) -> dict[str, Any]:
    options: dict[str, Any] = {"dtype": "bfloat16", "level": "O2"}
    if section["check_grad_overflow"]:
        section.use("check_grad_overflow")  # a scale of 1 that stays checks gradients, and skips bad steps
        options |= {"scale_loss": True, "init_scale": 1.0, "dynamic": False}
    return options


def _amp(section: Section, findings: Findings, name: str) -> dict[str, Any]:
    level = section["opt_level"]
    if level == "O0":
        section.note("opt_level", "is O0: everything runs in float32")
        section.settle(off="opt_level is O0")
        return {}
    if level == "O3":
        section.warn("opt_level", "parameters stay float32, as at level O2")
    section.use("opt_level")
    options: dict[str, Any] = {"dtype": "float16", "level": "O2" if level == "O3" else level}
    scale = section.use("loss_scale")
    if scale not in (None, "dynamic"):
        try:
            options |= {"init_scale": float(scale), "dynamic": False}
        except (TypeError, ValueError):
            section.problem("loss_scale", f"expected a number, or 'dynamic', found {scale!r:.80}")
    options |= {ours: section.use(theirs) for ours, theirs in _LIMITS.items() if section[theirs]}
    section.note("min_loss_scale", "is 0: the scale falls to the smallest normal number")
    return options


_LIMITS = {"floor": "min_loss_scale", "ceiling": "max_loss_scale"}


def _autocast(section: Section, findings: Findings, name: str) -> dict[str, Any]:
    half = section.use("dtype") in ("float16", "fp16", "half", "torch.float16")
    return {"dtype": "float16" if half else "bfloat16"}


_READERS: Mapping[str, tuple[Mapping[str, Known], Any]] = {
    "fp16": (known.FP16, _fp16),
    "bf16": (known.BF16, _bf16),
    "bfloat16": (known.BF16, _bf16),
    "amp": (known.AMP, _amp),
    "torch_autocast": (known.AUTOCAST, _autocast),
}
