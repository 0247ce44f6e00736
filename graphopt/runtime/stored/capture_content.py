"""What is written of a capture beside its programs, and how it is read back: plain data both ways."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any, get_args, overload

import torch

from graphopt import _torch
from graphopt.capture.forward.transformers_masks import PROPERTIES, Question, answer
from graphopt.ir.files.checked_json import Field
from graphopt.ir.node import Stage
from graphopt.ir.ops.updates.opaque_update import opaque_update_
from graphopt.ir.program import Program
from graphopt.rewriting.pass_ import Changed, Numerics, PassRecord

__all__ = [
    "READ",
    "LazySnapshots",
    "LazyStages",
    "read_questions",
    "read_records",
    "refuse_process_bound",
    "write_questions",
    "write_records",
]


READ = ", loaded from the cache"
"""How the label of a program ends that was read: behind all passes of its stage, which are not kept one by one."""


class LazyStages(MutableMapping[Stage, Program]):
    """The programs of a capture by stage, each read when it is first asked for."""

    def __init__(self, load: Mapping[Stage, Callable[[], Program]]) -> None:
        self._load = dict(load)
        self._programs: dict[Stage, Program] = {}

    def __getitem__(self, stage: Stage) -> Program:
        if stage not in self._programs:
            self._programs[stage] = self._load[stage]()
        return self._programs[stage]

    def __setitem__(self, stage: Stage, program: Program) -> None:
        self._load.setdefault(stage, lambda: program)
        self._programs[stage] = program

    def __delitem__(self, stage: Stage) -> None:
        del self._load[stage]
        self._programs.pop(stage, None)

    def __iter__(self) -> Iterator[Stage]:
        return iter(self._load)

    def __len__(self) -> int:
        return len(self._load)


def refuse_process_bound(program: Program) -> str:
    """What ties a program to this process, in words; empty for one that can be written."""
    for node in program.graph.nodes:
        if node.target in (opaque_update_, getattr(opaque_update_, "default", None)):
            return "the optimizer's update runs in eager mode, as Python"
        if node.target is _torch.custom_function and _torch.region_of(str(node.args[0])) is not None:
            return "it is of a model with distributed tensors, whose ops torch finds out in each process"
        if node.target is _torch.custom_function:
            return "it calls a torch.autograd.Function of the user, which is Python"
    return ""


def write_records(records: list[PassRecord]) -> list[dict[str, Any]]:
    """What passes did, but for what reports compute on demand."""
    return [
        {
            "name": record.name,
            "spec": record.spec,
            "stage": record.stage,
            "numerics": record.numerics,
            "seconds": record.seconds,
            "nodes": [record.nodes_before, record.nodes_after],
            "peaks": [record.peak_before, record.peak_after],
            "counts": dict(record.changed.counts),
            "bytes_saved": record.changed.bytes_saved,
            "tensors": list(record.changed.tensors),
            "lines": list(record.changed.lines),
            "reason": record.changed.reason,
            "satisfied": record.changed.satisfied,
        }
        for record in records
    ]


def read_records(field: Field) -> list[PassRecord]:
    """What passes did in the process that captured."""
    found = []
    for item in field.items():
        nodes = [number.whole(0) for number in item["nodes"].items(most=2)]
        peaks = [None if peak.value is None else peak.whole(0) for peak in item["peaks"].items(most=2)]
        if len(nodes) != 2 or len(peaks) != 2:
            raise item.expected("nodes and peaks before and behind")
        changed = Changed(
            {name: number.whole() for name, number in item["counts"].entries()},
            item["bytes_saved"].whole(),
            tuple(name.text() for name in item["tensors"].items()),
            tuple(line.text() for line in item["lines"].items()),
            item["reason"].text(),
            satisfied=item["satisfied"].truth(),
        )
        stage = item["stage"].one_of({name: name for name in get_args(Stage)})
        numerics = item["numerics"].one_of({name: name for name in get_args(Numerics)})
        name, spec, seconds = item["name"].text(), item["spec"].text(100_000), item["seconds"].number()
        found.append(PassRecord(name, spec, stage, numerics, changed, seconds, nodes[0], nodes[1], peaks[0], peaks[1]))
    return found


def write_questions(questions: Mapping[Question, bool]) -> list[list[Any]]:
    """What the model asked of a call's tensors, each with the answer that the programs are for."""
    return [[question.place, question.asked, yes] for question, yes in questions.items()]


def read_questions(field: Field, tensors: Sequence[torch.Tensor]) -> dict[Question, bool]:
    """What the model asked in the process that captured.

    Raises:
        GraphoptError: where these tensors answer otherwise.
    """
    found = {}
    for item in field.items(most=1_000):
        parts = list(item.items(most=3))
        if len(parts) != 3:
            raise item.expected("a place, a question and an answer")
        place, asked, yes = parts[0].whole(0), parts[1].one_of({name: name for name in PROPERTIES}), parts[2].value
        if place >= len(tensors) or tensors[place].dim() == 0 or tensors[place].layout is not torch.strided:
            raise parts[0].expected(f"the place of a mask or of positions among {len(tensors)} tensors")
        question = Question(place, asked)
        (found[question],) = answer([question], tensors)
        if found[question] is not yes:
            raise item.error(f"for calls of which tensor {place} {'' if yes else 'not '}{asked}, unlike in this one")
    return found


class LazySnapshots(Sequence[tuple[str, Program]]):
    """The programs of a capture that was read, each under a label; what lay between them was not kept."""

    def __init__(self, stages: LazyStages) -> None:
        self._stages = stages
        self._order = list(stages)

    def __len__(self) -> int:
        return len(self._order)

    @overload
    def __getitem__(self, index: int) -> tuple[str, Program]: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[tuple[str, Program]]: ...
    def __getitem__(self, index: int | slice) -> tuple[str, Program] | Sequence[tuple[str, Program]]:
        if isinstance(index, slice):
            return [self[place] for place in range(*index.indices(len(self)))]
        stage = self._order[index]
        return f"{stage}{READ}", self._stages[stage]
