"""What a capture depends on, as a document that is the same in every process that would capture the same.

It has a section for each kind of thing, and in each an entry for each thing, so that two of them can be compared entry
by entry: ``graphopt cache explain`` and the errors of ``load_step`` say what differs.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from graphopt import _torch
from graphopt.analysis.costs.cost import profile_of_cost
from graphopt.analysis.costs.device_names import is_profile_file
from graphopt.analysis.costs.figures import device_name
from graphopt.capture.call.flatten import flatten
from graphopt.capture.dynamo.graph_part import title_of
from graphopt.capture.effects.checks import step_hooks
from graphopt.capture.forward.transformers_masks import known_kind
from graphopt.capture.guards.code_analysis import found_by
from graphopt.capture.guards.fingerprint import global_flags, metadata, module_parts
from graphopt.capture.step.optimizer_tracer import NOTED
from graphopt.ir.files.checked_json import Field
from graphopt.ir.graphs.autocast import autocast_state
from graphopt.ir.version import VERSION
from graphopt.rewriting.pass_ import Pass
from graphopt.rewriting.pipeline import Pipeline
from graphopt.runtime.calls.captures import call_parts
from graphopt.runtime.stored.code_form import CodeForms
from graphopt.runtime.stored.stable_form import Form, NoStableFormError, StableForms, digest, qualified_name

__all__ = ["MACHINE", "Key", "Sections", "Subject", "differences", "program_key", "read_sections"]

MACHINE = "machine"
"""The section that says which machine plans and measured figures are for."""

_LONGEST = 120
"""Letters of an entry that stands as it is; a longer one stands as its digest."""

Sections = dict[str, dict[str, str]]


@dataclass(frozen=True)
class Key:
    """What a capture depends on.

    Attributes:
        title: whose capture it is, for people.
        sections: everything that it depends on.
    """

    title: str
    sections: Sections

    @functools.cached_property
    def name(self) -> str:
        """Letters and digits that stand for all of it."""
        return digest(self.sections)[:40]


@dataclass(frozen=True)
class Subject:
    """What is captured, and how.

    Attributes:
        model: the bare model.
        loss: as for ``CaptureSession``.
        optimizer: whose update ends the program; None for a program without one.
        example: positional and keyword arguments of the call; None where there is no call yet.
        pipeline: whose passes run.
        until: the stage of the program that runs.
        compiler: which kind of backend makes the code.
        verify: how far passes are checked.
        room: the bytes that the program may take where it is one part of a model (``Context.room``).
        sizes: which sizes vary, where some do: ``"auto"`` for what tracing has found, or what a user has declared.
            None where they are those of the example.
    """

    model: nn.Module
    loss: Any
    optimizer: torch.optim.Optimizer | None
    example: tuple[tuple[Any, ...], Mapping[str, Any]] | None
    pipeline: Pipeline
    until: str
    compiler: str
    verify: object
    room: int | None = None
    sizes: Any = None


def program_key(subject: Subject) -> Key:
    """The key of a capture that is about to be made; nothing is traced for it.

    Raises:
        NoStableFormError: where something that it depends on cannot be compared between processes: what and where.
    """
    modules = {id(module): path for path, module in subject.model.named_modules()}
    code = CodeForms(modules)
    forms = StableForms(modules, code.meet)
    given = [] if subject.example is None else flatten((subject.example[0], dict(subject.example[1])), paths=False)[0]
    tensors = [*subject.model.parameters(), *subject.model.buffers(), *given]
    sections: dict[str, Mapping[str, Form]] = {
        "versions": _versions(),
        MACHINE: _machine({tensor.device for tensor in tensors}),
        "passes": {
            current.name: [str(current), _form(forms, current, f"the pass {current.name}"), *_profiles(current)]
            for current in subject.pipeline.passes
        },
        "options": {
            "until": subject.until,
            "backend": subject.compiler,
            "verify": str(subject.verify),
            **({} if subject.room is None else {"bytes of a part": str(subject.room)}),
        },
        "settings": _settings(),
        "model": _model(subject.model, forms),
        "call": {} if subject.example is None else _call(subject, forms),
        "loss": {"loss": _form(forms, subject.loss, "the loss")},
        "optimizer": {} if subject.optimizer is None else _optimizer(subject.optimizer, subject.model, forms),
    }
    sections["code"] = code.follow() | _of_libraries(subject, forms)
    return Key(title_of(subject.model), {name: _readable(section) for name, section in sections.items()})


def _of_libraries(subject: Subject, forms: StableForms) -> dict[str, Form]:
    """The variables that the code of installed libraries reads."""
    found = found_by(subject.model, subject.loss).of_libraries
    return {f"variable {name}": _form(forms, value, f"the variable {name}") for name, value in found.items()}


def _profiles(current: Pass) -> list[str]:
    """The profile in the file that a pass takes seconds from, which may change under its name."""
    cost = getattr(current, "cost", None)
    return [repr(profile_of_cost(cost))] if isinstance(cost, str) and is_profile_file(cost) else []


def _call(subject: Subject, forms: StableForms) -> dict[str, Form]:
    """The structure of the arguments, the tensors among them, and the values of the others."""
    assert subject.example is not None
    tensors, structure = flatten((subject.example[0], dict(subject.example[1])), paths=False)
    spec = str(structure.spec)
    if " at 0x" in spec:
        raise NoStableFormError("arguments whose structure cannot be compared")
    leaves = [leaf for leaf, tensor in zip(structure.leaves, structure.is_tensor, strict=True) if not tensor]
    described, sharing = call_parts(tensors, sizes=subject.sizes is None)
    values = _form(forms, leaves, "the arguments of the call")
    found: dict[str, Form] = {"structure": spec, "values": values, "sharing": str(sharing)}
    if subject.sizes is not None:
        found["sizes that vary"] = _form(forms, subject.sizes, "dynamic_shapes")
    found |= {f"class of tensor {index}": qualified_name(cls) for index, cls in enumerate(structure.classes) if cls}
    found |= {f"tensor {index}": str(each) for index, each in enumerate(described)}
    return found | {f"tensor {index} is": kind for index, tensor in enumerate(tensors) if (kind := known_kind(tensor))}


def differences(wanted: Sections, found: Sections, *, most: int = 5) -> list[str]:
    """What differs between two keys, in words, with ``found`` as what there is and ``wanted`` as what is asked for."""
    lines = []
    for section in wanted.keys() | found.keys():
        mine, other = wanted.get(section, {}), found.get(section, {})
        for name in sorted(mine.keys() | other.keys()):
            if mine.get(name) != other.get(name):
                lines.append(f"{section}: {name}{_change(other.get(name), mine.get(name))}")
    lines.sort(key=_rank)
    return lines if len(lines) <= most else [*lines[:most], f"and {len(lines) - most} more"]


def read_sections(field: Field) -> Sections:
    """The sections of a key, from a file."""
    return {name: {entry: text.text() for entry, text in part.entries()} for name, part in field.entries()}


_ORDER = ("versions", MACHINE, "options", "passes", "model", "optimizer", "loss", "call", "code", "settings")


def _rank(line: str) -> tuple[int, bool, str]:
    """What says most comes first."""
    section = line.split(":")[0]
    return _ORDER.index(section) if section in _ORDER else len(_ORDER), line.endswith("has changed"), line


def _change(before: str | None, now: str | None) -> str:
    if before is None:
        return " is new"
    if now is None:
        return " is gone"
    short = all(len(text) <= _LONGEST and not text.startswith("#") for text in (before, now))
    return f" was {before}, is {now}" if short else " has changed"


def _readable(section: Mapping[str, Form]) -> dict[str, str]:
    found = {}
    for name, form in section.items():
        text = form if isinstance(form, str) else json.dumps(form)
        found[name] = text if len(text) <= _LONGEST and "digest" not in text else f"#{digest(form)}"
    return found


def _form(forms: StableForms, value: Any, where: str) -> Form:
    try:
        return forms.form(value)
    except NoStableFormError as error:
        raise NoStableFormError(f"{where}: {error}") from None


def _versions() -> dict[str, str]:
    python = ".".join(platform.python_version_tuple()[:2])
    return {"torch": str(torch.__version__), "graphopt": f"{VERSION} {_own_source()}", "python": python}


@functools.cache
def _own_source() -> str:
    """A digest of graphopt's own files: in a checkout they change without a version."""
    root = Path(__file__).resolve().parents[2]
    found = hashlib.sha256()
    for folder in (root, root / "passes"):  # the second is a link in a checkout, which is not followed from the first
        names = [
            os.path.join(place, name)
            for place, _, files in os.walk(folder)
            for name in files
            if name.endswith((".py", ".toml"))
        ]
        for name in sorted(names):
            with open(name, "rb", buffering=0) as file:
                found.update(name.removeprefix(f"{folder}{os.sep}").encode() + b"\0" + file.readall())
    return found.hexdigest()[:16]


def _machine(devices: set[torch.device]) -> dict[str, str]:
    kinds = {device for device in devices if device.type in ("cpu", "cuda")}
    found = {f"device {device}": device_name(device) for device in kinds}
    for device in kinds:
        if device.type == "cuda":
            found[f"bytes of {device}"] = str(torch.cuda.get_device_properties(device).total_memory)
    group = dist.is_available() and dist.is_initialized()
    ranks = str(dist.get_world_size()) if group else "1"
    names = {f"group {name}": str(ranks) for name, ranks in _groups().items()} if group else {}
    if group:  # which code of the model, of a loss or of a pass may ask for
        names["rank"] = str(dist.get_rank())
    return {**found, "threads": str(torch.get_num_threads()), "ranks": ranks, **names}


def _groups() -> dict[str, list[int]]:
    """The ranks of each group that this process belongs to, by the name that programs have."""
    return {name: dist.get_process_group_ranks(group) for name, group in _torch.process_groups().items()}


def _settings() -> dict[str, str]:
    hooks = _torch.global_module_hooks()
    if hooks:
        raise NoStableFormError("hooks that act on all modules")
    return {"flags": str(global_flags()), "autocast": str(autocast_state())}


def _model(model: nn.Module, forms: StableForms) -> dict[str, Form]:
    """Each module by its path, and each parameter and buffer by its name."""
    paths = {id(module): path for path, module in model.named_modules()}
    seen: dict[int, str] = {}
    found: dict[str, Form] = {}
    for path, module in model.named_modules():
        forms.form(type(module))
        parts = module_parts(module)
        where = f"{type(module).__name__} {path}".strip()
        attributes = {name: _form(forms, value, f".{name} of {where}") for name, value in parts.attributes.items()}
        hooks = _form(forms, parts.hooks, f"the hooks of {where}")
        children = [[name, paths.get(id(child))] for name, child in module._modules.items()]
        found[path or "(the model)"] = [qualified_name(type(module)), module.training, attributes, hooks, children]
        for name, tensor in parts.tensors.items():
            full = f"{path}.{name}" if path else name
            if tensor is None:
                found[full] = "None"
                continue
            same = seen.setdefault(id(tensor), full)
            found[full] = f"{_words(tensor)}{'' if same == full else f', the same as {same}'}"
    return found


def _words(tensor: torch.Tensor) -> str:
    known: Any = metadata(tensor)
    dtype, device, shape, strides, requires_grad, hooked = known
    words = [f"{str(dtype).removeprefix('torch.')}{list(shape)} on {device}"]
    words += [] if tensor.is_contiguous() else [f"strides {strides}"]
    words += [] if requires_grad else ["frozen"]
    return ", ".join([*words, *(["with hooks"] if hooked else []), type(tensor).__name__])


def _optimizer(optimizer: torch.optim.Optimizer, model: nn.Module, forms: StableForms) -> dict[str, Form]:
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    forms.form(type(optimizer))
    found: dict[str, Form] = {"class": qualified_name(type(optimizer))}
    found["step"] = digest(inspect.signature(type(optimizer).step).__str__())
    for index, group in enumerate(optimizer.param_groups):
        where = f"group {index}"
        found[f"{where}: parameters"] = [names.get(id(parameter), "?") for parameter in group["params"]]
        rate = group["lr"]
        found[f"{where}: lr"] = str(metadata(rate)) if isinstance(rate, torch.Tensor) else "a number"
        for name, value in group.items():
            if name not in ("params", "lr", "initial_lr"):
                found[f"{where}: {name}"] = _form(forms, value, f"{name!r} of the optimizer")
    found["hooks"] = step_hooks(optimizer)
    for name, value in vars(optimizer).items():
        if name not in (*NOTED, "defaults") and not _wraps_step(name, value):
            found[f"attribute {name}"] = _form(forms, value, f".{name} of the optimizer")
    return found


def _wraps_step(name: str, value: Any) -> bool:
    """Whether an attribute is the wrapper that torch's schedulers put around ``step``, which only counts calls."""
    return name == "step" and getattr(value, "__module__", "").startswith("torch.")
