"""Structures of results as plain data and back."""

from __future__ import annotations

import json
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from graphopt import GraphoptError
from graphopt.capture.call.flatten import flatten
from graphopt.ir.files.checked_json import Field
from graphopt.runtime.stored.result_structure import read_structure, write_structure
from graphopt.runtime.stored.stable_form import NoStableFormError, qualified_name

Pair = namedtuple("Pair", ["one", "two"])


@dataclass
class Result:
    loss: torch.Tensor
    more: Any = None


T = torch.zeros(1)
RESULTS = {
    "tensor": T,
    "containers": {"a": [T, (T, 1)], "b": OrderedDict(c=T), 3: None},
    "named tuple": Pair(T, [1.5, "x"]),
    "dataclass": Result(T, {"x": T}),
}


@pytest.mark.parametrize("result", RESULTS.values(), ids=RESULTS)
def test_a_structure_comes_back_as_it_was(result: Any) -> None:
    _, structure = flatten(result)
    data = json.loads(json.dumps(write_structure(structure)))
    again = read_structure(Field(data), {qualified_name(Pair), qualified_name(Result)})
    assert (again.spec, again.leaves, again.is_tensor, again.paths) == (
        structure.spec, structure.leaves, structure.is_tensor, structure.paths,
    )  # fmt: skip


@pytest.mark.parametrize("value", [{1, 2}, object(), torch.float16, {(1, 2): T}])
def test_what_is_no_plain_result_is_refused(value: Any) -> None:
    with pytest.raises(NoStableFormError):
        write_structure(flatten([value])[1])


DEEP: Any = {"tensor": True}
for _ in range(100):
    DEEP = {"list": [DEEP]}

HOSTILE: list[Any] = [
    {"class": "subprocess.Popen", "fields": {"args": {"value": "false"}}},
    {"class": "os.system", "fields": {}},
    {"class": qualified_name(Result), "fields": {"nothing": {"value": 1}}},
    {"class": qualified_name(Pair), "fields": {}},
    {"class": "torch.nn.modules.linear.Linear", "fields": {"in_features": {"value": 1}}},
    {"set": []},
    {"list": 3},
    {"dict": [[1]]},
    {"value": []},
    {"float": "x"},
    [],
    None,
    DEEP,
]


@pytest.mark.parametrize("data", HOSTILE, ids=range(len(HOSTILE)))
def test_data_of_strangers_is_an_error(data: Any) -> None:
    known = {qualified_name(Result), qualified_name(Pair), "subprocess.Popen", "torch.nn.modules.linear.Linear"}
    with pytest.raises(GraphoptError):
        read_structure(Field(data), known)


def test_a_class_that_the_model_does_not_refer_to_is_an_error() -> None:
    data = {"class": qualified_name(Result), "fields": {"loss": {"tensor": True}}}
    with pytest.raises(GraphoptError, match="no class that this model's code refers to"):
        read_structure(Field(data), set())
