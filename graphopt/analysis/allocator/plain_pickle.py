"""Reading plain data out of a pickle: nothing in the file is looked up, imported or called.

A pickle is a program for a small stack machine. This one knows the instructions that make numbers, texts, lists, tuples
and dicts, and refuses all others with their place; those that name a class or call something are among them. Work and
memory grow with the bytes of the file alone: what it holds several times is kept once.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from graphopt.errors import GraphoptError, quoted

__all__ = ["read_plain_pickle"]

_MARK = object()

_CALLS = {
    b"c": "names a class or function",
    b"\x93": "names a class or function",
    b"\x82": "names a class or function",
    b"\x83": "names a class or function",
    b"\x84": "names a class or function",
    b"R": "calls a function",
    b"o": "makes an object",
    b"i": "makes an object",
    b"b": "sets up an object",
    b"\x81": "makes an object",
    b"\x92": "makes an object",
    b"P": "names an object outside of it",
    b"Q": "names an object outside of it",
}
"""What the instructions do that are never plain data."""


def read_plain_pickle(data: bytes) -> Any:
    """The plain data in a pickle of protocol 2 or later, as Python and torch's C++ code write it.

    Args:
        data: the whole file.

    Raises:
        GraphoptError: for a file that is cut short or malformed, and for instructions that make more than numbers,
            texts, lists, tuples and dicts; with the byte at which it stands.
    """
    machine = _Machine(data)
    while not machine.stopped:
        machine.step()
    return machine.result


class _Machine:
    """The state of reading: a stack, the values that are remembered, and how far it is."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._place = 0
        self._stack: list[Any] = []
        self._memo: dict[int, Any] = {}
        self.stopped = False
        self.result: Any = None

    def step(self) -> None:
        """Read one instruction and do it."""
        start = self._place
        code = self._take(1)
        act = _INSTRUCTIONS.get(code)
        if act is None:
            what = _CALLS.get(code, "does nothing that makes plain data")
            raise GraphoptError(
                f"byte {start} of the pickle, instruction {code!r}, {what}: only numbers, texts, lists, tuples and "
                "dicts are read"
            )
        try:
            act(self)
        except GraphoptError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
            raise GraphoptError(
                f"byte {start} of the pickle, instruction {code!r}: malformed ({quoted(error)})"
            ) from None

    # --- bytes -------------------------------------------------------------------------------------------------------

    def _take(self, count: int) -> bytes:
        found = self._data[self._place : self._place + count]
        if len(found) != count:
            size = len(self._data)
            raise GraphoptError(f"the pickle ends after {size} bytes, and {count} more belong at byte {self._place}")
        self._place += count
        return found

    def number(self, form: str) -> Any:
        """A number in a form of ``struct``."""
        return struct.unpack(form, self._take(struct.calcsize(form)))[0]

    def counted(self, form: str) -> bytes:
        """As many bytes as a number before them says."""
        return self._take(self.number(form))

    # --- the stack ---------------------------------------------------------------------------------------------------

    def push(self, value: Any) -> None:
        """Put a value on the stack."""
        self._stack.append(value)

    def pop(self) -> Any:
        """Take the topmost value."""
        value = self._stack.pop()
        if value is _MARK:
            raise ValueError("a value is missing")
        return value

    def pop_to_mark(self) -> list[Any]:
        """Take the values above the topmost mark, and the mark."""
        stack = self._stack
        place = len(stack) - 1
        while stack[place] is not _MARK:
            place -= 1
            if place < 0:
                raise ValueError("no mark is before this")
        found = stack[place + 1 :]
        del stack[place:]
        return found

    def mark(self) -> None:
        """Mark where a number of values begins."""
        self._stack.append(_MARK)

    def top(self, kind: type) -> Any:
        """The topmost value, which has to be a list or a dict."""
        value = self._stack[-1]
        if type(value) is not kind:
            raise ValueError(f"a {kind.__name__} is missing")
        return value

    def remember(self, number: int | None = None) -> None:
        """Remember the topmost value."""
        if self._stack[-1] is _MARK:
            raise ValueError("a value is missing")
        self._memo[len(self._memo) if number is None else number] = self._stack[-1]

    def recall(self, number: int) -> None:
        """Push a value that is remembered."""
        if number not in self._memo:
            raise ValueError(f"value {number} is not remembered")
        self._stack.append(self._memo[number])

    def stop(self) -> None:
        """The one value that is left is the result."""
        self.result = self.pop()
        if self._stack:
            raise ValueError(f"{len(self._stack)} values are left over")
        self.stopped = True

    # --- containers --------------------------------------------------------------------------------------------------

    def tuple_of(self, count: int) -> None:
        """A tuple of the topmost values."""
        self.push(tuple(reversed([self.pop() for _ in range(count)])))

    def append(self, values: list[Any]) -> None:
        """Put values at the end of a list."""
        self.top(list).extend(values)

    def set_items(self, values: list[Any]) -> None:
        """Put names and their values into a dict."""
        found = self.top(dict)
        names = values[::2]
        if len(values) % 2 or not all(type(name) in (str, int, type(None)) for name in names):
            raise ValueError("the names in a dict are texts and whole numbers")
        found.update(zip(names, values[1::2], strict=True))


def _whole(data: bytes) -> int:
    if len(data) > _LONGEST_NUMBER:
        raise ValueError(f"a whole number of {len(data)} bytes")
    return int.from_bytes(data, "little", signed=True)


_LONGEST_NUMBER = 64
"""Bytes of a whole number; addresses have 8."""


def _text(data: bytes) -> str:
    return data.decode("utf-8", "surrogatepass")


def _protocol(machine: _Machine) -> None:
    protocol = machine.number("<B")
    if not 2 <= protocol <= 5:
        raise ValueError(f"protocol {protocol}; those from 2 to 5 are read")


def _set_one(machine: _Machine) -> None:
    value = machine.pop()
    machine.set_items([machine.pop(), value])


_INSTRUCTIONS: dict[bytes, Callable[[_Machine], object]] = {
    b"\x80": _protocol,
    b"\x95": lambda m: m.number("<Q"),
    b".": _Machine.stop,
    b"(": _Machine.mark,
    b"0": lambda m: m.pop(),
    b"1": lambda m: m.pop_to_mark(),
    b"N": lambda m: m.push(None),
    b"\x88": lambda m: m.push(True),
    b"\x89": lambda m: m.push(False),
    b"K": lambda m: m.push(m.number("<B")),
    b"M": lambda m: m.push(m.number("<H")),
    b"J": lambda m: m.push(m.number("<i")),
    b"\x8a": lambda m: m.push(_whole(m.counted("<B"))),
    b"\x8b": lambda m: m.push(_whole(m.counted("<I"))),
    b"G": lambda m: m.push(m.number(">d")),
    b"\x8c": lambda m: m.push(_text(m.counted("<B"))),
    b"X": lambda m: m.push(_text(m.counted("<I"))),
    b"\x8d": lambda m: m.push(_text(m.counted("<Q"))),
    b"C": lambda m: m.push(m.counted("<B")),
    b"B": lambda m: m.push(m.counted("<I")),
    b"\x8e": lambda m: m.push(m.counted("<Q")),
    b"]": lambda m: m.push([]),
    b"a": lambda m: m.append([m.pop()]),
    b"e": lambda m: m.append(m.pop_to_mark()),
    b"l": lambda m: m.push(m.pop_to_mark()),
    b")": lambda m: m.push(()),
    b"t": lambda m: m.push(tuple(m.pop_to_mark())),
    b"\x85": lambda m: m.tuple_of(1),
    b"\x86": lambda m: m.tuple_of(2),
    b"\x87": lambda m: m.tuple_of(3),
    b"}": lambda m: m.push({}),
    b"s": _set_one,
    b"u": lambda m: m.set_items(m.pop_to_mark()),
    b"q": lambda m: m.remember(m.number("<B")),
    b"r": lambda m: m.remember(m.number("<I")),
    b"\x94": lambda m: m.remember(),
    b"h": lambda m: m.recall(m.number("<B")),
    b"j": lambda m: m.recall(m.number("<I")),
}
"""What each instruction does; their codes are those of Python's ``pickletools``."""
