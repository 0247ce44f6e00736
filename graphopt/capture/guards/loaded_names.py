"""Which names the code of a function loads, and which attributes of these: its bytecode is read, not run."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterable, Iterator, Sequence

__all__ = [
    "begun",
    "chains_of",
    "compares_types",
    "found_by_text",
    "instructions_of",
    "loaded_names",
    "names_among",
    "names_in",
    "texts_in",
]

_STARTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_GLOBAL", "STORE_NAME")

Chain = tuple[str, ...]
"""How a value is reached: ``("global", "config", "beta")``, ``("cell", "beta")``, ``("self", "beta")``, and from what a
function imports, ``("module", "package.config", "beta")``."""


@functools.lru_cache(maxsize=32)
def instructions_of(code: types.CodeType) -> tuple[dis.Instruction, ...]:
    """The instructions of a function's code alone, which are read several times in a row."""
    return tuple(dis.get_instructions(code))


@functools.lru_cache(maxsize=10_000)
def chains_of(code: types.CodeType) -> tuple[Chain, ...]:
    """What a function's code reads, with those inside of it; but for global variables that it sets, which are told."""
    found: dict[Chain, None] = {}
    written: set[str] = set()
    own = code.co_varnames[0] if code.co_argcount else ""
    pending = [code]
    while pending:
        current = pending.pop()
        pending += _inner(current)
        chain: Chain = ()
        imports = _imports(current)
        for instruction in instructions_of(current):
            if instruction.opname in _ATTRIBUTES and chain:
                chain = (*chain, str(instruction.argval))
                continue
            found[chain] = None
            chain = ()
            if instruction.opname in _WRITES:
                written.add(str(instruction.argval))
            elif instruction.opname.startswith("LOAD_FAST") and instruction.argval in imports:
                chain = imports[instruction.argval]
            elif instruction.opname.startswith(_STARTS):
                value = instruction.argval
                name = str(value[-1] if isinstance(value, tuple) else value)
                if name == own and not instruction.opname.startswith("LOAD_GLOBAL"):
                    chain = ("self",)
                elif instruction.opname in ("LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF"):
                    chain = ("cell", name)
                elif instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                    chain = ("global", name)
        found[chain] = None
    return tuple(chain for chain in found if chain and not (len(chain) > 1 and chain[1] in written))


@functools.lru_cache(maxsize=10_000)
def loaded_names(code: types.CodeType) -> frozenset[str]:
    """The names that a function's code, with those inside of it, looks up as global variables or imports.

    What it reads as an attribute alone (``self.loss``) is not among them, whatever a global variable is called.
    """
    found = {str(instruction.argval) for instruction in instructions_of(code) if _loads_variable(instruction)}
    return frozenset(found).union(*map(loaded_names, _inner(code)))


def _loads_variable(instruction: dis.Instruction) -> bool:
    return instruction.opcode in dis.hasname and not instruction.opname.endswith(("_ATTR", "_METHOD"))


_BY_TEXT = frozenset(("__dict__", "attrgetter", "delattr", "getattr", "hasattr", "methodcaller", "vars"))
"""What finds attributes by texts."""

_CALL = "PRECALL" if "PRECALL" in dis.opmap else "CALL"
"""The instruction behind the arguments of a call."""

_BY_NAME = frozenset(("delattr", "getattr", "hasattr"))

_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)*")
_WORD = re.compile(r"[^\W\d]\w*")


def names_among(texts: Iterable[str], *, run: bool) -> set[str]:
    """The names among texts; where these are run as code, those in them."""
    return {word for text in texts for word in (_WORD.findall(text) if run else [text]) if word.isidentifier()}


def begun(names: Iterable[str], texts: Iterable[str], shortest: int = 2) -> set[str]:
    """The names that begin with one of some texts: ``beta_1`` for the text of ``f"beta_{index}"``.

    Args:
        names: of variables or attributes.
        texts: from code.
        shortest: texts of fewer letters do not count.
    """
    starts = tuple(text for text in texts if len(text) >= shortest)
    return {name for name in names if name.startswith(starts)}


@functools.lru_cache(maxsize=10_000)
def names_in(code: types.CodeType) -> frozenset[str]:
    """Every name in a function's code and in those inside of it; where attributes are found by texts, these too."""
    return frozenset(code.co_names).union(found_by_text(code), *map(names_in, _inner(code)))


@functools.lru_cache(maxsize=10_000)
def found_by_text(code: types.CodeType) -> frozenset[str]:
    """The names of attributes, there or not, that a function's code may look for by texts, and those inside of it."""
    texts = frozenset() if _BY_TEXT.isdisjoint(code.co_names) else texts_in(code)
    names = (name for text in texts if _PATH.fullmatch(text) for name in text.split("."))
    return frozenset(names).union(*map(found_by_text, _inner(code)))


@functools.lru_cache(maxsize=10_000)
def computes_names(code: types.CodeType) -> bool:
    """Whether a function's code finds attributes by texts that are not in it as they are: ``getattr(owner, name)``."""
    if any(map(computes_names, _inner(code))):
        return True
    steps = instructions_of(code)
    if not {"__dict__", "vars", "attrgetter", "methodcaller"}.isdisjoint(code.co_names):
        return True
    if any(step.opname == "MATCH_CLASS" for step in steps):
        return True
    return any(
        step.argval in _BY_NAME and not _takes_a_constant(steps[place + 1 :])
        for place, step in enumerate(steps)
        if _loads_variable(step)
    )


def _takes_a_constant(steps: Sequence[dis.Instruction]) -> bool:
    """Whether the second argument of a function is a constant, by what follows where the function is loaded."""
    depth, ends = 0, dict[int, int]()  # of each argument, where it may be complete
    for place, step in enumerate(steps):
        if step.opname == _CALL and step.arg == depth:
            return 2 in ends and ends[2] == ends[1] + 1 and steps[ends[2]].opname == "LOAD_CONST"
        depth += _depth(step)
        ends[depth] = place
    return False


def _depth(step: dis.Instruction) -> int:
    return dis.stack_effect(step.opcode, step.arg if step.opcode >= dis.HAVE_ARGUMENT else None, jump=False)


@functools.lru_cache(maxsize=10_000)
def texts_in(code: types.CodeType) -> frozenset[str]:
    """The texts in a function's code, and in those inside of it."""
    return frozenset(_texts(code.co_consts)).union(*map(texts_in, _inner(code)))


def _texts(constants: object) -> Iterator[str]:
    if isinstance(constants, str):
        yield constants
    elif isinstance(constants, (tuple, frozenset)):
        for constant in constants:
            yield from _texts(constant)


def _inner(code: types.CodeType) -> Iterator[types.CodeType]:
    return (constant for constant in code.co_consts if isinstance(constant, types.CodeType))


def _imports(code: types.CodeType) -> dict[str, Chain]:
    """What the variables of a function are that it imports."""
    found: dict[str, Chain] = {}
    module, name = "", ""
    for instruction in instructions_of(code):
        if instruction.opname == "IMPORT_NAME":
            module, name = str(instruction.argval), ""
        elif instruction.opname == "IMPORT_FROM":
            name = str(instruction.argval)
        elif instruction.opname == "STORE_FAST" and module:
            found[str(instruction.argval)] = ("module", module, name) if name else ("module", module.partition(".")[0])
            module = module if name else ""  # several names may be taken from one
        elif instruction.opname == "POP_TOP":
            module = ""
    return found


_TENSORS = ("Tensor", "Parameter", "Buffer")
_COMPARES = ("IS_OP", "COMPARE_OP", "CONTAINS_OP")


@functools.lru_cache(maxsize=10_000)
def compares_types(code: types.CodeType) -> bool:
    """Whether a function's code, or one inside of it, compares ``type(...)`` with a class of tensors."""
    if any(map(compares_types, _inner(code))):
        return True
    called = False
    since: set[str] = set()
    for instruction in instructions_of(code):
        name = str(instruction.argval)
        if instruction.opname == "LOAD_GLOBAL" and name == "type":
            called, since = True, set()
        elif instruction.opname.startswith("STORE_"):
            called = False
        elif instruction.opname in _COMPARES and called:
            if not since.isdisjoint(_TENSORS):
                return True
            called = False
        elif instruction.opname.startswith(("LOAD_GLOBAL", "LOAD_ATTR", "LOAD_NAME", "LOAD_DEREF")):
            since.add(name)
    return False
