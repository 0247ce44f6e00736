"""The Python that a capture runs, as far as it can be reached: functions, classes, and the globals that they read.

Functions of the user's files are followed: their code, and what the global names in it stand for. A library that is
installed counts by the files of what is used of it; torch, graphopt and Python count by their versions.
"""

from __future__ import annotations

import builtins
import functools
import hashlib
import os
import sys
import types
from pathlib import Path
from typing import Any

from graphopt.capture.guards.code_owner import LIBRARIES, is_covered_file
from graphopt.capture.guards.loaded_names import loaded_names, names_in
from graphopt.runtime.stored.stable_form import NoStableFormError, StableForms, code_digest, digest, qualified_name

__all__ = ["CodeForms"]

_MOST = 50_000
"""Functions and classes that are followed."""

_NO_CODE = frozenset(
    {
        "__dict__",
        "__weakref__",
        "__doc__",
        "__module__",
        "__annotations__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__abstractmethods__",
        "__match_args__",
        "__qualname__",
        "__parameters__",
        "__orig_bases__",
        "__slots__",
        "__hash__",
        "__firstlineno__",
        "__static_attributes__",
        "_abc_impl",
        "__annotate_func__",
        "__annotations_cache__",
    }
)
"""What a class has that does not decide what its code does."""


_BY_TEXT = frozenset(("eval", "exec", "globals"))
_OF_MODULES = frozenset(("import_module", "__import__"))
"""What finds variables by texts that another process may have otherwise."""


class CodeForms:
    """Collects what is met, and follows it.

    Args:
        modules: of the model by their ids, as for ``StableForms``.

    Attributes:
        found: what was found of each function, class, global and library, by its name.
    """

    def __init__(self, modules: dict[int, str]) -> None:
        self.found: dict[str, str] = {}
        self._modules = modules
        self._met: dict[int, Any] = {}
        self._waiting: list[Any] = []

    def meet(self, value: Any) -> None:
        """Note a function or a class, to be followed by ``follow``."""
        if id(value) not in self._met and not _is_covered(value):
            self._met[id(value)] = value
            self._waiting.append(value)

    def follow(self) -> dict[str, str]:
        """Everything that the code which was met consists of.

        Raises:
            NoStableFormError: for a global variable without a form, or more code than is followed.
        """
        while self._waiting:
            if len(self._met) > _MOST:
                raise NoStableFormError(f"more than {_MOST} functions and classes")
            value = self._waiting.pop()
            library = _library_file(value)
            if library is not None:
                self._note(f"file of {value.__module__}", _file_digest(library))
            elif isinstance(value, type):
                self._class(value)
            else:
                self._function(value)
        return self.found

    def _note(self, name: str, text: str) -> None:
        """Note one; several of one name (lambdas) count together, in whatever order they come."""
        known = self.found.get(name)
        self.found[name] = text if known in (None, text) else digest(sorted([known or "", text]))

    def _forms(self) -> StableForms:
        return StableForms(self._modules, self.meet)

    def _class(self, cls: type) -> None:
        for base in (*cls.__mro__, type(cls)):
            if base is not cls:
                self.meet(base)
        for name, value in vars(cls).items():
            if name in _NO_CODE:
                continue
            if isinstance(value, (staticmethod, classmethod)):
                value = value.__func__
            if isinstance(value, functools.cached_property):
                value = value.func
            parts = [value.fget, value.fset] if isinstance(value, property) else [value]
            for part in parts:
                self._attribute(cls, name, part)

    def _attribute(self, cls: type, name: str, value: Any) -> None:
        if isinstance(value, (types.FunctionType, type)):
            self.meet(value)
        elif not isinstance(value, (types.MemberDescriptorType, types.GetSetDescriptorType)):
            place = f"{qualified_name(cls)}.{name}"
            try:
                self._note(f"class attribute {place}", digest(self._forms().form(value)))
            except NoStableFormError as error:
                raise NoStableFormError(f"{error}, in the class attribute {place}") from None

    def _function(self, value: Any) -> None:
        code = value.__code__
        form = [code_digest(code), *([] if value.__closure__ is None else [digest(self._forms().form(value))])]
        self._note(f"function {qualified_name(value)}", digest(form))
        names = names_in(code)
        by_text = _BY_TEXT & loaded_names(code) - value.__globals__.keys() or _OF_MODULES & names
        if by_text:
            raise NoStableFormError(f"variables that {value.__qualname__} finds by a text ({min(by_text)})")
        for name in sorted(loaded_names(code)):
            if name in value.__globals__:
                self._global(f"{value.__module__}.{name}", value.__globals__[name], names)
            elif name in sys.modules and not hasattr(builtins, name):
                self._global(name, sys.modules[name], names)
        if names & {"environ", "getenv", "environb"}:
            for text in sorted(_texts(code)):
                if text in os.environ:
                    self._note(f"environment variable {text}", digest(os.environ[text]))

    def _global(self, name: str, value: Any, names: frozenset[str]) -> None:
        """What a global name stands for; of a module, what the function may read of it."""
        if f"global {name}" in self.found and not isinstance(value, types.ModuleType):
            return
        if isinstance(value, types.ModuleType):
            self._module(value, names)
        elif isinstance(value, (types.FunctionType, type)):
            self.found[f"global {name}"] = qualified_name(value)
            if isinstance(value, types.FunctionType):
                self._plain(name, value)
            self.meet(value)
        else:
            self._plain(name, value)

    def _plain(self, name: str, value: Any) -> None:
        self.found[f"global {name}"] = ""  # for what refers to itself
        try:
            self.found[f"global {name}"] = digest(self._forms().form(value))
        except NoStableFormError as error:
            raise NoStableFormError(f"{error}, in the global variable {name}") from None

    def _module(self, module: types.ModuleType, names: frozenset[str]) -> None:
        file = getattr(module, "__file__", None)
        if file is None or is_covered_file(file):
            return
        if any(part in file for part in LIBRARIES):
            self._note(f"file of {module.__name__}", _file_digest(file))
            return
        for name in sorted(names & set(vars(module))):
            place = f"{module.__name__}.{name}"
            value = vars(module)[name]
            if not (isinstance(value, types.ModuleType) and f"module {place}" in self.found):
                if isinstance(value, types.ModuleType):
                    self.found[f"module {place}"] = value.__name__
                self._global(place, value, names)


def _texts(code: types.CodeType) -> set[str]:
    found = {constant for constant in code.co_consts if isinstance(constant, str)}
    return found.union(*(_texts(constant) for constant in code.co_consts if isinstance(constant, types.CodeType)))


def _file_of(value: Any) -> str:
    if isinstance(value, types.FunctionType):
        return value.__code__.co_filename
    module = sys.modules.get(value.__module__) if isinstance(value.__module__, str) else None
    return getattr(module, "__file__", None) or ""


def _is_covered(value: Any) -> bool:
    """Whether a version says all of a function or a class: it is of torch, of graphopt or of Python."""
    if isinstance(value, type) and value.__module__ in ("builtins", "typing", "abc"):
        return True
    return is_covered_file(_file_of(value))


def _library_file(value: Any) -> str | None:
    """The file of a function or a class of an installed library; None for what is followed."""
    file = _file_of(value)
    return file if any(part in Path(file).parts for part in LIBRARIES) and Path(file).is_file() else None


@functools.lru_cache(maxsize=10_000)
def _digest_of(file: str, _changed: int, _size: int) -> str:
    return hashlib.sha256(Path(file).read_bytes()).hexdigest()


def _file_digest(file: str) -> str:
    try:
        known = os.stat(file)
        return _digest_of(file, known.st_mtime_ns, known.st_size)
    except OSError as error:
        raise NoStableFormError(f"the file {file}, which cannot be read ({error})") from None
