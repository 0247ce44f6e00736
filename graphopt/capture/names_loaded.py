"""Which names the code of a function loads, and which attributes of these: its bytecode is read, not run."""

from __future__ import annotations

import dis
import functools
import types

__all__ = ["chains_of", "compares_types", "loaded_names"]

_STARTS = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF", "LOAD_FROM_DICT_OR_DEREF", "LOAD_FAST")
_ATTRIBUTES = ("LOAD_ATTR", "LOAD_METHOD")
_WRITES = ("STORE_GLOBAL", "STORE_NAME")

Chain = tuple[str, ...]
"""How a value is reached: ``("global", "config", "beta")``, ``("cell", "beta")``, ``("self", "beta")``, and from what a
function imports, ``("module", "package.config", "beta")``."""


@functools.lru_cache(maxsize=10_000)
def chains_of(code: types.CodeType) -> tuple[Chain, ...]:
    """What a function's code reads, with those inside of it; but for global variables that it sets, which are told."""
    found: dict[Chain, None] = {}
    written: set[str] = set()
    own = code.co_varnames[0] if code.co_argcount else ""
    pending = [code]
    while pending:
        current = pending.pop()
        pending += [constant for constant in current.co_consts if isinstance(constant, types.CodeType)]
        chain: Chain = ()
        imports = _imports(current)
        for instruction in dis.get_instructions(current):
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
    found = {
        str(instruction.argval)
        for instruction in dis.get_instructions(code)
        if instruction.opcode in dis.hasname and not instruction.opname.endswith(("_ATTR", "_METHOD"))
    }
    inner = (loaded_names(constant) for constant in code.co_consts if isinstance(constant, types.CodeType))
    return frozenset(found).union(*inner)


def _imports(code: types.CodeType) -> dict[str, Chain]:
    """What the variables of a function are that it imports."""
    found: dict[str, Chain] = {}
    module, name = "", ""
    for instruction in dis.get_instructions(code):
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
    if any(isinstance(constant, types.CodeType) and compares_types(constant) for constant in code.co_consts):
        return True
    called = False
    since: set[str] = set()
    for instruction in dis.get_instructions(code):
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
