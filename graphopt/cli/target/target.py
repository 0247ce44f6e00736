"""What the command line looks at: a factory in the user's code that gives a model and a batch to capture it with."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import nn

from graphopt.analysis.costs.profiles import DeviceProfile
from graphopt.capture import CaptureSession
from graphopt.capture.call.source_lines import user_frame
from graphopt.capture.devices.for_device import without_data_for
from graphopt.cli.arguments.exit_codes import UsageError
from graphopt.cli.arguments.named_files import KEYS, RETURNS, near_modules, place_of
from graphopt.errors import GraphoptError, did_you_mean
from graphopt.ir.node import Stage

__all__ = ["Target", "checked_target", "load_target"]

S = TypeVar("S", bound=CaptureSession)
T = TypeVar("T")

_SHOWN_TEXT = 60


@dataclass(frozen=True, slots=True)
class Target:
    """What a factory returned, checked.

    Attributes:
        text: how the user wrote it: ``pkg.module:factory`` or ``path/file.py:factory``.
        model: the bare module.
        args: positional example inputs.
        kwargs: keyword example inputs.
        loss: ``loss(model, *batch)``; ``True`` where the model's own result is or has the loss; None for no loss.
        optimizer: whose update ends the step, or None.
        dynamic_shapes: as for ``torch.export.export``.
    """

    text: str
    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    loss: Callable[..., torch.Tensor] | bool | None = None
    optimizer: torch.optim.Optimizer | None = None
    dynamic_shapes: Any = None

    @property
    def last_stage(self) -> Stage:
        """The last stage that the target allows: ``step`` with an optimizer, ``joint`` without."""
        return "joint" if self.optimizer is None else "step"

    def session(self, profile: DeviceProfile | None = None) -> CaptureSession:
        """See ``session_of``."""
        return self.session_of(CaptureSession, profile)

    def session_of(self, kind: type[S], profile: DeviceProfile | None = None) -> S:
        """A capture of the model on its example inputs; an error of eager mode is told as one of the call.

        Args:
            kind: the class of the capture.
            profile: of the device for which it is captured without data; None for a capture of what is here.

        Raises:
            CaptureError: where the model or its loss cannot be captured.
        """
        model, optimizer, args, kwargs = self.model, self.optimizer, self.args, self.kwargs
        if profile is not None:
            twins = without_data_for(profile, model, optimizer, args, kwargs, self.dynamic_shapes)
            model, optimizer, args, kwargs = twins.model, twins.optimizer, twins.args, twins.kwargs
        session = kind(model, args, kwargs, loss=self.loss, optimizer=optimizer, dynamic_shapes=self.dynamic_shapes)
        session.to_run = True
        return session


def load_target(text: str) -> Target:
    """Import the module or file that ``text`` names, call its factory, and check what it returns.

    The working directory (for a module) or the file's folder (for a file) is put on ``sys.path``, as ``python`` does.

    Args:
        text: ``pkg.module:factory`` or ``path/file.py:factory``; the factory takes no arguments and returns
            ``(model, example_inputs)`` or a dict with ``model``, ``example_inputs``, ``kwargs``, ``loss``,
            ``optimizer`` and ``dynamic_shapes``.

    Raises:
        GraphoptError: for text of another form; a file, module or name that is not there; code that raises, with its
            line; a result of another form.
    """
    place, is_file, attribute = place_of(text)
    module = _load_file(Path(place)) if is_file else _load_module(place)
    factory = _attribute(module, attribute, place)
    _check_callable(factory, text)
    return checked_target(_user_code(f"{text} ", factory), text)


# --- finding the factory ---------------------------------------------------------------------------------------------


def _importable(folder: Path) -> None:
    path = str(folder.resolve())
    if path not in sys.path:
        sys.path.insert(0, path)


def _load_file(path: Path) -> ModuleType:
    _importable(path.parent)
    name = f"graphopt_target_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve())
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    loader = spec.loader
    assert loader is not None
    _user_code(f"importing {path} ", lambda: loader.exec_module(module))
    return module


def _load_module(name: str) -> ModuleType:
    _importable(Path.cwd())
    importlib.invalidate_caches()
    try:
        return _user_code(f"importing {name} ", lambda: importlib.import_module(name))
    except GraphoptError as error:
        cause = error.__cause__
        if isinstance(cause, ModuleNotFoundError) and cause.name and f"{name}.".startswith(f"{cause.name}."):
            raise UsageError(f"there is no module {cause.name!r}; {near_modules(cause.name)}") from cause
        raise


def _attribute(module: ModuleType, name: str, place: str) -> Any:
    found: Any = module
    for part in name.split("."):
        if not hasattr(found, part):
            known = [key for key, value in vars(found).items() if callable(value) and not key.startswith("_")]
            hint = did_you_mean(part, known) or f"it defines {', '.join(known[:8]) or 'no functions'}"
            raise UsageError(f"{place} has no {name!r}; {hint}")
        found = getattr(found, part)
    return found


# --- running the user's code -----------------------------------------------------------------------------------------


def _check_callable(factory: Any, text: str) -> None:
    model = factory if isinstance(factory, type) else type(factory)
    if issubclass(model, nn.Module):
        raise UsageError(f"{text} is {_is(factory)}, and {_FACTORY}\n{_written(factory, text)}")
    if not callable(factory):
        raise UsageError(
            f"{text} is {_kind(factory)}, not a function: name a function without arguments that returns {RETURNS}"
        )
    try:
        inspect.signature(factory).bind()
    except TypeError as error:
        raise UsageError(
            f"{text} cannot be called without arguments ({error}): give its parameters defaults, or name a function "
            "that calls it"
        ) from error
    except ValueError:  # a callable whose signature Python does not know
        return


def _is(model: Any) -> str:
    return (
        f"the class {model.__name__}" if isinstance(model, type) else f"a model (of the class {type(model).__name__})"
    )


_FACTORY = "a TARGET names a factory: a function without arguments that returns a model and inputs to capture it with"


def _written(model: Any, text: str) -> str:
    """How a factory for a model, or a class of models, is written, with the names that its forward has."""
    place, _, name = text.rpartition(":")
    made = f"{name}(...)" if isinstance(model, type) else name
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):  # Python knows no signature
        parameters = {}.values()
    names = [each.name for each in parameters if each.kind < each.VAR_POSITIONAL and each.name != "self"] or ["x"]
    inputs = f"({names[0]},)" if len(names) == 1 else f"({', '.join(names)})"
    return (
        f"  what to do: write one, with tensors for {' and '.join(names)}, and name {place}:factory\n"
        f"      def factory():\n"
        f"          return {made}, {inputs}"
    )


def _user_code(what: str, action: Callable[[], T]) -> T:
    try:
        return action()
    except (Exception, SystemExit) as error:
        advice = ""
        if isinstance(error, SystemExit):
            advice = '\n  what to do: keep what runs as a script under if __name__ == "__main__":'
        failure = GraphoptError(f"{what}raised {type(error).__name__}: {error}\n  where: {_user_line(error)}{advice}")
        for note in getattr(error, "__notes__", ()):
            failure.add_note(note)
        raise failure from error


def _user_line(error: BaseException) -> str:
    """``file:line in function: code`` of the innermost line that is not an installed package's."""
    if isinstance(error, SyntaxError) and error.filename:
        return f"{error.filename}:{error.lineno}: {(error.text or '').strip()}"
    installed = tuple(sysconfig.get_path(kind) for kind in ("stdlib", "purelib", "platlib"))
    own = str(Path(__file__).parents[1])
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if not frame.filename.startswith((*installed, own, "<")):
            return f"{frame.filename}:{frame.lineno} in {frame.name}: {frame.line}"
    return user_frame(error.__traceback__)


# --- checking what it returns ----------------------------------------------------------------------------------------


def _kind(value: Any) -> str:
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)} ({', '.join(type(item).__name__ for item in value)})"
    text = repr(value)
    return f"{type(value).__name__} {text}" if len(text) <= _SHOWN_TEXT and "\n" not in text else type(value).__name__


def _unknown_keys(value: Mapping[Any, Any]) -> Iterator[str]:
    for key in value:
        if key not in KEYS:
            hint = did_you_mean(str(key), KEYS) or f"known keys: {', '.join(KEYS)}"
            yield f"unknown key {key!r}; {hint}"


def _wrong_values(given: Mapping[str, Any]) -> Iterator[str]:
    for key, value in given.items():
        message = _problem(key, value)
        if message:
            yield f"{key!r} {message}"


def _positional(args: Any) -> tuple[Any, ...]:
    """The positional arguments that ``example_inputs`` stands for."""
    if args is None:
        return ()
    return (args,) if isinstance(args, torch.Tensor) else tuple(args)


def checked_target(value: Any, text: str) -> Target:
    """What a factory returned, as a target.

    Args:
        value: a model with its example inputs, or a dict.
        text: how the user wrote the target.

    Raises:
        GraphoptError: for a result of another form, with all that is wrong.
    """
    if isinstance(value, (tuple, list)) and len(value) == 2:
        value = {"model": value[0], "example_inputs": value[1]}
    if not isinstance(value, Mapping):
        inputs = ": the example inputs are missing" if isinstance(value, nn.Module) else ""
        raise GraphoptError(f"{text} returned {_kind(value)}{inputs}; a factory returns {RETURNS}")
    given = {key: value.get(key) for key in KEYS}
    problems = [*_unknown_keys(value), *_wrong_values(given)]
    if problems:
        raise GraphoptError("\n  ".join([f"what {text} returned is not right:", *problems]))
    model = given["model"]
    assert isinstance(model, nn.Module)
    return Target(
        text=text,
        model=model,
        args=_positional(given["example_inputs"]),
        kwargs=given["kwargs"] or {},
        loss=given["loss"] or None,
        optimizer=given["optimizer"],
        dynamic_shapes=given["dynamic_shapes"],
    )


def _problem(key: str, value: Any) -> str:
    """What is wrong with the value of ``key``; empty where nothing is."""
    if key == "model":
        return _model_problem(value)
    if value is None or key == "dynamic_shapes":
        return ""
    if key == "example_inputs" and isinstance(value, Mapping):
        return "is a dict: return a dict with keyword inputs under the key 'kwargs' and positional ones as a tuple"
    by_name = isinstance(value, Mapping) and all(isinstance(name, str) for name in value)
    wanted, fits = {
        "example_inputs": ("a tuple of the positional inputs", isinstance(value, (tuple, list, torch.Tensor))),
        "kwargs": ("a dict of the keyword inputs", by_name),
        "loss": ("loss(model, *batch), or True where the model returns it", callable(value) or isinstance(value, bool)),
        "optimizer": ("a torch.optim optimizer over model.parameters()", isinstance(value, torch.optim.Optimizer)),
    }[key]
    return "" if fits else f"is {_kind(value)}, and must be {wanted}"


def _model_problem(value: Any) -> str:
    if value is None:
        return "is missing"
    if isinstance(value, nn.Module):
        return ""
    advice = ": call it" if isinstance(value, type) and issubclass(value, nn.Module) else ""
    return f"is {_kind(value)}, and must be an nn.Module{advice}"
