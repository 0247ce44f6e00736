"""Forms of Python values: equal for what is equal in another process, different for what is different."""

from __future__ import annotations

import collections
import enum
import functools
import logging
import math
import re
import threading
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from graphopt.runtime.stored.code_form import CodeForms
from graphopt.runtime.stored.stable_form import NoStableFormError, StableForms, code_digest, digest


class Color(enum.Enum):
    RED = 1
    BLUE = 2


@dataclass
class Config:
    width: int = 3
    names: list[str] = field(default_factory=lambda: ["a"])


class Slotted:
    __slots__ = ("a", "b")

    def __init__(self, a: int) -> None:
        self.a = a


def form(value: Any) -> str:
    return digest(StableForms({}).form(value))


def adder(number: float) -> Any:
    return lambda x: x + number


def looping() -> list[Any]:
    found: list[Any] = [1]
    found.append(found)
    return found


EQUAL = {
    "numbers": lambda: [1, 2.5, True, None, 3j],
    "dict": lambda: {"a": 1, "b": [Color.RED]},
    "set": lambda: {f"name {number}" for number in range(50)},
    "dataclass": Config,
    "slots": lambda: Slotted(3),
    "closure": lambda: adder(2.0),
    "partial": lambda: functools.partial(adder, 2),
    "tensor": lambda: torch.arange(5.0),
    "array": lambda: np.arange(3),
    "deque": lambda: collections.deque([1, 2]),
    "circle": looping,
    "module of Python": lambda: math,
    "torch's functions": lambda: [F.gelu, torch.relu, torch.nn.functional.cross_entropy],
    "torch's values": lambda: [torch.float16, torch.device("cpu"), torch.Size([1]), torch.finfo(torch.float32)],
    "method": lambda: Config().names.append,
    "others": lambda: [re.compile("a+"), logging.getLogger("x"), PurePosixPath("/a"), range(3), slice(1), ...],
}


@pytest.mark.parametrize("make", EQUAL.values(), ids=EQUAL)
def test_values_made_twice_are_equal(make: Any) -> None:
    assert form(make()) == form(make())


DIFFERENT = [
    (1, 1.0), (0.0, -0.0), (1, True), ("1", 1), (b"a", "a"), ([1], (1,)), ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
    (Color.RED, Color.BLUE), (Config(3), Config(4)), (Slotted(1), Slotted(2)), (adder(1.0), adder(2.0)),
    (F.gelu, F.relu), (torch.arange(3), torch.arange(3) + 1), (torch.zeros(2, 3), torch.zeros(3, 2).t()),
    (torch.zeros(1), torch.zeros(1, dtype=torch.float64)), (functools.partial(adder, 1), functools.partial(adder, 2)),
    (np.zeros(2), np.zeros(2, dtype=np.float32)), (lambda x: x + 1, lambda x: x + 2), (Config, Slotted), ([], None),
    (lambda x, n=1: x + n, lambda x, n=2: x + n), (float("nan"), float("inf")), ([[1], 2], [1, [2]]),
]  # fmt: skip


@pytest.mark.parametrize("pair", DIFFERENT, ids=range(len(DIFFERENT)))
def test_values_that_differ_have_other_forms(pair: tuple[Any, Any]) -> None:
    assert form(pair[0]) != form(pair[1])


NONE = {
    "generator": torch.Generator(),
    "lock": threading.Lock(),
    "in a list": [1, {"a": threading.Lock()}],
    "parameter": nn.Parameter(torch.zeros(1)),
    "without data": torch.zeros(1, device="meta"),
    "iterator": iter([1]),
    "plain object": object(),
}


@pytest.mark.parametrize("value", NONE.values(), ids=NONE)
def test_what_cannot_be_compared_is_refused(value: Any) -> None:
    with pytest.raises(NoStableFormError):
        form(value)


def test_equal_values_are_equal_whether_they_are_one_object_or_two() -> None:
    shared = [1, 2]
    assert form([shared, shared]) == form([[1, 2], [1, 2]])


def test_lines_and_files_do_not_count_in_code() -> None:
    one = compile("def f(x):\n    return x + 1", "a.py", "exec")
    other = compile("\n\n\ndef f(x):\n\n    return x + 1", "b.py", "exec")
    third = compile("def f(x):\n    return x + 2", "a.py", "exec")
    assert code_digest(one) == code_digest(other) != code_digest(third)


def _code_of(source: str, name: str = "f") -> dict[str, str]:
    space: dict[str, Any] = {"__name__": "tests.made"}
    exec(compile(source, "made.py", "exec"), space)
    forms = CodeForms({})
    forms.meet(space[name])
    return forms.follow()


BASE = "C = 3\nclass K:\n    size = 2\ndef g(x):\n    return x * C\ndef f(x):\n    return [g(y) + K.size for y in x]\n"


@pytest.mark.parametrize(
    ("old", "new"), [("C = 3", "C = 4"), ("x * C", "x / C"), ("size = 2", "size = 5"), ("K.size", "-K.size")]
)
def test_what_a_function_reaches_is_part_of_it(old: str, new: str) -> None:
    assert _code_of(BASE) == _code_of(BASE)
    assert _code_of(BASE) != _code_of(BASE.replace(old, new))


def test_what_a_function_does_not_reach_is_no_part_of_it() -> None:
    assert _code_of(BASE) == _code_of(BASE + "\nD = 4\ndef h():\n    return D\n")


def test_a_global_that_cannot_be_compared_is_refused_by_name() -> None:
    with pytest.raises(NoStableFormError, match=r"the global variable tests.made.lock"):
        _code_of("import threading\nlock = threading.Lock()\ndef f(x):\n    with lock:\n        return x")


class Noted:
    """Like a configuration of ``transformers``, which notes the ``hash`` of a text: another number in each process."""

    def __init__(self, noted: int, n_hash: int = 3) -> None:
        self.n_hash, self._original_object_hash = n_hash, noted


def test_what_hash_gave_does_not_count() -> None:
    assert StableForms({}).form(Noted(1)) == StableForms({}).form(Noted(2))
    assert StableForms({}).form(Noted(1)) != StableForms({}).form(Noted(1, n_hash=4))
