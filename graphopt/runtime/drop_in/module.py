"""`optimize`: a module that is used like the one it was made from, and whose training calls run a rewritten program."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from types import MethodType
from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import fx, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.parametrize import is_parametrized

from graphopt import _torch
from graphopt.errors import CaptureError, GraphoptError, PipelineError, is_own, public, short_traceback
from graphopt.ir.program import Program
from graphopt.ir.provided.methods import provided
from graphopt.rewriting.pass_ import Pass, Records
from graphopt.runtime.drop_in.set_forward import entry, of_any_model, what_runs

if TYPE_CHECKING:
    from graphopt.rewriting.pipeline import Passes, Pipeline
    from graphopt.runtime.compile.backend import Backend
    from graphopt.runtime.drop_in.model_captures import DropIn
    from graphopt.runtime.programs.rewrite import Verify
    from graphopt.runtime.runner import Options

__all__ = ["Optimized", "optimize", "take_over"]

M = TypeVar("M", bound=nn.Module)

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
"""Where torch keeps the hooks of a module: those of an optimized model act around the program."""


class _Forward:
    """The ``forward`` of an optimized model: what was set on it, or on the model that it was made from, or the class's.

    A data descriptor, since the dictionary that the two models share may hold a ``forward`` for the other one.
    """

    def __init__(self, cls: type[nn.Module]) -> None:
        self._cls = cls
        self._known: tuple[Any, Callable[..., Any]] = cls.forward, entry(cls.forward, _start)

    @property
    def _of_class(self) -> Callable[..., Any]:
        """The class's, as it is now."""
        given = self._cls.forward
        if given is not self._known[0]:
            self._known = given, entry(given, _start)
        return self._known[1]

    def __get__(self, model: Optimized | None, _: type | None = None) -> Any:
        if model is None:
            return self._of_class
        own = model._own_forward
        if own is None and "forward" in model.__dict__:
            given = model.__dict__["forward"]
            if model._other_forward[0] is not given:
                model._other_forward = given, entry(of_any_model(model, given), _start)
            own = model._other_forward[1]
        return MethodType(own or self._of_class, model)

    def __set__(self, model: Optimized, value: Any) -> None:
        of_class = getattr(value, "__func__", None) is self._of_class
        model._own_forward = None if of_class else entry(of_any_model(model, value), _start)

    def __delete__(self, model: Optimized) -> None:
        model._own_forward = None


class Optimized(nn.Module):
    """What ``graphopt.optimize`` returns: the given model's class with a ``forward`` that runs a rewritten program.

    It shares all attributes with the model it was made from: what is set on one of them is set on the other, but for
    ``forward``. Training calls with gradients on run the program; calls in eval mode or without gradients run the plain
    ``forward``.
    """

    if TYPE_CHECKING:  # libraries look annotations of their models' subclasses up, where these names are not known
        _graphopt: DropIn
        _own_forward: Callable[..., Any] | None
        _other_forward: tuple[Any, Callable[..., Any] | None]

    # --- looking -----------------------------------------------------------------------------------------------------

    @property
    def program(self) -> Program:
        """The rewritten joint program of the latest signature."""
        return self._graphopt.latest.rewritten.program

    @property
    def programs(self) -> tuple[Program, ...]:
        """The programs of a model that is captured in parts, in order; of any other, its one program."""
        parts = self._graphopt.parts
        return (self.program,) if parts is None else parts.programs

    @property
    def graph_module(self) -> fx.GraphModule:
        """The latest joint program as one generated module (autograd runs its two halves)."""
        return self.program.to_graph_module()

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The half that runs at the call; returns outputs, then what is saved for backward."""
        return self._graphopt.latest.forward

    @property
    def backward_graph(self) -> fx.GraphModule:
        """The half that autograd runs; takes what was kept and the outputs' tangents, returns gradients."""
        return self._graphopt.latest.backward

    @property
    def snapshots(self) -> Sequence[tuple[str, Program]]:
        """``(label, program)`` after capture, after each lowering and after each pass."""
        return self._graphopt.latest.rewritten.snapshots

    @property
    def records(self) -> Records:
        """What each pass did; for a model in parts, part by part."""
        if self._graphopt.parts is not None:
            return Records(self._graphopt.parts.records)
        return Records(self._graphopt.latest.rewritten.records)

    def __repr__(self) -> str:
        """A line that says so above what the given model's class shows."""
        return f"{self._graphopt.describe()}\n{super().__repr__()}"

    def _repr_html_(self) -> str:
        inherited = getattr(self._graphopt.original, "_repr_html_", None)
        return str(inherited(self) if inherited is not None else provided(Optimized, "notebook")(self))

    def __setattr__(self, name: str, value: Any) -> None:
        """A ``forward`` that is set on the model is what its program computes from then on."""
        if name == "forward":
            object.__setattr__(self, name, value)
        else:
            super().__setattr__(name, value)

    # --- copying -----------------------------------------------------------------------------------------------------

    def _plain_model(self) -> nn.Module:
        """What the program of a call computes: the model without what runs around ``forward`` at each call.

        That is an object of the class it was made from, sharing everything, without the root's hooks, and without a
        ``__call__`` of its class.
        """
        plain = self._original_model()
        plain.__class__ = _called_as_usual(type(plain))  # type: ignore[arg-type]
        for hooks in _HOOKS:
            plain.__dict__[hooks] = self._graphopt.hooks_inside(plain.__dict__[hooks])
        return plain

    def _original_model(self) -> nn.Module:
        """What was given to ``optimize``: an object of the class it was made from, sharing everything."""
        plain: nn.Module = object.__new__(self._graphopt.original)
        plain.__dict__.update(self.__dict__)
        if getattr(self.forward, "__func__", None) is not type(self).forward:
            plain.__dict__["forward"] = MethodType(what_runs(self), plain)
        return plain

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Copies and pickles hold the plain model, the options and what passes keep; they capture again when called."""
        plain = self._original_model()
        own = {name: value for name, value in self.__dict__.items() if getattr(value, "__self__", None) is self}
        for name in own:
            del plain.__dict__[name]
        made = _rebuild, (plain, self._graphopt.options, self._graphopt.runner.store.state_dict())
        return (*made, own) if own else made  # what is bound to this object is bound to the copy, once there is one


def take_over(model: nn.Module, passes: Passes | Pipeline) -> tuple[nn.Module, list[Pass]]:
    """A model as it was before ``optimize``, and its passes together with those of what is made of it now.

    Raises:
        CaptureError: for a model after ``fully_shard``.
        PipelineError: where a pass is in both.
    """
    from graphopt.rewriting.pipeline import Pipeline

    given = list((passes if isinstance(passes, Pipeline) else Pipeline(passes)).passes)
    if not isinstance(model, Optimized):
        return model, given
    inner = list(model._graphopt.options.pipeline.passes)
    both = {current.name for current in inner} & {current.name for current in given}
    if both:
        raise PipelineError(
            f"{sorted(both)[0]!r} is given here and in graphopt.optimize around the model: give it once, to one of them"
        )
    if any(cls.__name__ == "FSDPModule" for cls in type(model).__mro__):
        raise CaptureError(
            f"{type(model).__name__} was given to fully_shard and to graphopt.optimize: give optimize_step the model "
            "as fully_shard left it, and all passes"
        )
    return model._original_model(), [*inner, *given]


def _rebuild(plain: nn.Module, options: Options, state: Mapping[str, torch.Tensor]) -> nn.Module:
    result = optimize(
        plain,
        options.pipeline.passes,
        dynamic_shapes=options.dynamic_shapes,
        backend=options.backend,
        verify=options.verify,
    )
    assert isinstance(result, Optimized)
    result._graphopt.runner.store.load(state)
    return result


def _is_traced() -> bool:
    """Whether this thread traces the model; torch says so to all threads while one of them does."""
    if not torch.compiler.is_compiling():
        return False
    from graphopt.capture.effects.side_effects import CAPTURE_LOCK

    with CAPTURE_LOCK:  # behind a capture of another thread, and at once inside of this thread's own
        return torch.compiler.is_compiling()


def _by_others(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether ``torch.fx.symbolic_trace`` or ``torch.jit.trace`` traces the call.

    Raises:
        CaptureError: where the former traces the optimized model itself, whose ``forward`` it takes to pieces.
    """
    if isinstance(args, fx.Proxy):
        raise CaptureError(
            "torch.fx.symbolic_trace cannot trace an optimized model: trace the one that was given to "
            "graphopt.optimize; the two share all parameters"
        )
    return cast(Any, torch.jit).is_tracing() or any(isinstance(value, fx.Proxy) for value in (*args, *kwargs.values()))


def _start(given: Callable[..., Any], model: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a call of an optimized model: the program, or what it computes where it is not for training, or traced."""
    taken_over = not isinstance(model, Optimized)  # by a whole step, whose program it is part of
    if taken_over or not model.training or not torch.is_grad_enabled():
        return given(model, *args, **kwargs)
    model._graphopt.look_for_shards(model, args)
    if _is_traced() or _by_others(args, kwargs):
        return model._graphopt.eager(given, model, args, kwargs)
    if _torch.in_function_transform():
        return model._graphopt.run_as_it_is(given, model, args, kwargs, "a transform of torch.func is at work")
    if _torch.in_forward_mode():
        return model._graphopt.run_as_it_is(given, model, args, kwargs, "forward-mode differentiation is at work")
    if mode := " and ".join(filter(None, _torch.callers_modes())):
        return model._graphopt.run_as_it_is(given, model, args, kwargs, f"{mode} sees each call of torch")
    if _torch.parametrizations_are_cached() and any(map(is_parametrized, model.modules())):
        why = "torch.nn.utils.parametrize.cached() is at work, and what it keeps is shared between calls"
        return model._graphopt.run_as_it_is(given, model, args, kwargs, why)
    if given is not what_runs(model):
        why = "a forward is called that another one has replaced (model.forward = ...)"
        return model._graphopt.run_as_it_is(given, model, args, kwargs, why)
    try:
        return model._graphopt.call(model, args, kwargs)
    except GraphoptError as error:
        if not is_own(error):
            raise
        raise short_traceback(error) from error.__cause__


@functools.cache
def _called_as_usual(cls: type[nn.Module]) -> type[nn.Module]:
    """A model's class, or a subclass under the same name for one that has a ``__call__`` of its own."""
    calls = {name: getattr(nn.Module, name) for name in ("__call__", "_wrapped_call_impl", "_call_impl")}
    if all(getattr(cls, name) is usual for name, usual in calls.items()):
        return cls
    return type(cls.__name__, (cls,), {**calls, "__module__": cls.__module__, "__qualname__": cls.__qualname__})


@functools.cache
def _shared(metaclass: Any) -> Any:
    """A metaclass of optimized classes: what is set on one of them is set on the class that it was made from.

    So ``type(model).scale = 2.0`` acts on the model that was given too, and on its program. An object that is made of
    one of them (``type(model)(...)``, a slice of an ``nn.Sequential``) is of that class, and not optimized.
    """

    def is_own(name: str) -> bool:
        return name.startswith("__") or name == "_abc_impl"

    def set_attribute(cls: Any, name: str, value: Any) -> None:
        if is_own(name):
            metaclass.__setattr__(cls, name, value)
        else:
            setattr(cls.__mro__[2], name, value)

    def delete_attribute(cls: Any, name: str) -> None:
        if is_own(name):
            metaclass.__delattr__(cls, name)
        else:
            delattr(cls.__mro__[2], name)

    def make(cls: Any, *args: Any, **kwargs: Any) -> Any:
        return cls.__mro__[2](*args, **kwargs)

    body = {"__setattr__": set_attribute, "__delattr__": delete_attribute, "__call__": make}
    return type(metaclass.__name__, (metaclass,), body)


@functools.cache
def _optimized_class(cls: type[nn.Module]) -> type[Optimized]:
    """A subclass of a model's class under the same name, whose training calls run programs."""
    body = {
        "__slots__": ("_graphopt", "_other_forward", "_own_forward"),
        "forward": _Forward(cls),
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
    }
    made: type[Optimized] = _shared(cast(Any, type(cls)))(cls.__name__, (Optimized, cls), body)
    return made


@public
def optimize(
    model: M,
    passes: Passes = (),
    *,
    example_inputs: tuple[Any, ...] | None = None,
    dynamic_shapes: Any = "auto",
    backend: Backend = "eager",
    verify: Verify = "structure",
) -> M:
    """A module with the same parameters, ``state_dict`` keys and call, whose training calls run a rewritten program.

    The user's loop stays as it is: ``loss = criterion(model(x), y); loss.backward(); optimizer.step()``. Captures
    happen at the first call of each signature (shapes, dtypes, structure, training flags); calls in eval mode or under
    ``no_grad`` run the plain forward. So do calls inside of transforms of ``torch.func``, with a warning.

    Args:
        model: the bare module. It is not changed, and shares everything with the result, attributes set later too.
        passes: ``Pass`` objects or their text form (``"recompute{checkpoints=blocks.*}"``), in a list in any order, or
            one alone; None for no passes; ``"auto"`` for a plan where the device's memory is short
            (``fit-memory{budget=auto}``).
        example_inputs: positional inputs to capture with right away.
        dynamic_shapes: ``"auto"`` lets an axis vary from its second size on, so that few captures serve all sizes; None
            captures each size by itself; or the sizes that may vary, as for ``torch.export.export``.
        backend: ``"eager"`` (the generated code), ``"inductor"``, or ``callable(graph_module, inputs)`` applied to the
            forward and the backward half.
        verify: ``"structure"`` (the invariant table after each pass), ``"numerics"`` (also compare with the unrewritten
            program on the example inputs), or False.

    Returns:
        An object of a subclass of the model's class, with ``program``, ``snapshots``, ``records``, ``graph_module``,
        ``forward_graph`` and ``backward_graph`` to look at.

    Raises:
        PipelineError: where the passes do not fit together, or one needs the whole step.
        CaptureError: where the model cannot be captured, or is a lazy module without sizes.

    Example:
        >>> model = graphopt.optimize(model, [Recompute("blocks.*")])
        >>> model(x).square().mean().backward()
        >>> optimizer.step()
        >>> model.records[0].name
        'recompute'
    """
    # what captures and runs programs: for those who make one
    from graphopt.capture.call.sharded_form import is_fully_sharded
    from graphopt.capture.call.tensor_parallel_form import has_distributed_tensors
    from graphopt.runtime.drop_in.model_captures import DropIn
    from graphopt.runtime.drop_in.sharded_call import FullyShardedCalls, ShardedCalls
    from graphopt.runtime.runner import Options

    if isinstance(model, Optimized):
        raise CaptureError("the model is optimized already: give all passes to one call of graphopt.optimize")
    if isinstance(model, DistributedDataParallel):
        from graphopt.runtime.drop_in.wrapped import around

        inner = optimize(
            cast(nn.Module, model.module),
            passes,
            example_inputs=example_inputs,
            dynamic_shapes=dynamic_shapes,
            backend=backend,
            verify=verify,
        )
        return cast(M, around(model, inner, cast(Optimized, inner)._graphopt.options.pipeline))
    sharded, distributed = is_fully_sharded(model), has_distributed_tensors(model)
    options = Options.checked(
        model, passes, dynamic_shapes, backend, verify, fully_sharded=sharded, distributed=distributed
    )
    _refuse_update(options.pipeline)
    if issubclass(cast(Any, type(model)), LazyModuleMixin):
        from graphopt.capture.guards.fingerprint import refuse_lazy

        refuse_lazy(model)  # whose class becomes another one at the first batch
    result: Any = object.__new__(_optimized_class(type(model)))  # type: ignore[arg-type]
    object.__setattr__(result, "__dict__", model.__dict__)
    drop_in = DropIn(type(model), options, result.get_parameter, result._plain_model)
    if sharded:
        drop_in.sharded = FullyShardedCalls(model, result, options.pipeline)
    elif distributed:
        drop_in.sharded = ShardedCalls(model, options.pipeline)
    own = {"_graphopt": drop_in, "_own_forward": None, "_other_forward": (None, None)}
    for name, value in own.items():
        object.__setattr__(result, name, value)
    if example_inputs is not None:
        drop_in.prepare(result, example_inputs)
    return cast(M, result)


def _refuse_update(pipeline: Pipeline) -> None:
    late = [p.name for p in pipeline.passes if p.stage == "step"]
    if late:
        raise PipelineError(
            f"{', '.join(late)} {'rewrites' if len(late) == 1 else 'rewrite'} the optimizer's update, which a drop-in "
            "model does not hold: use optimize_step"
        )
