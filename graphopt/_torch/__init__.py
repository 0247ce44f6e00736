"""Every call into torch's private modules, in one place, checked against the version that is installed.

The rest of graphopt uses public torch only. What is private here is private because torch offers no public way:
capturing forward and backward as one graph, tracing an optimizer, replaying a random-number generator inside a graph,
and reading the allocator's own events.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections import Counter
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
import torch.utils._pytree as pytree
from torch import fx, nn
from torch._C._profiler import _EventType
from torch._dynamo.source import ConstantSource
from torch._functorch import config as functorch_config
from torch._functorch.aot_autograd import (
    aot_compile_joint_with_descriptors,
    aot_export_joint_with_descriptors,
)
from torch._guards import detect_fake_mode, tracing
from torch._higher_order_ops.utils import registered_hop_fake_fns
from torch._ops import HigherOrderOperator, OpOverload
from torch._prims.rng_prims import run_and_save_rng_state, run_with_rng_state
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch._subclasses.functional_tensor import FunctionalTensor, FunctionalTensorMode
from torch.fx.experimental.proxy_tensor import (
    ProxyTorchDispatchMode,
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)
from torch.fx.experimental.symbolic_shapes import DimDynamic, GuardOnDataDependentSymNode, ShapeEnv
from torch.fx.graph import CodeGen
from torch.fx.node import map_aggregate
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._sympy.numbers import int_oo
from torch.utils._sympy.value_ranges import ValueRanges

from graphopt.errors import CaptureError

__all__ = [
    "AotInput",
    "AotOutput",
    "BoxedCodeGen",
    "CallRecorder",
    "FakeTensor",
    "FakeTensorMode",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "InductorCode",
    "JointTrace",
    "OpOverload",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_to_all_single",
    "autocast_operators",
    "broadcast",
    "broadcast_",
    "compile_with_inductor",
    "cpu_computes_in",
    "custom_function",
    "example_twins",
    "generated_function",
    "has_autocast_rule",
    "intercept_checkpoint",
    "intercept_custom_functions",
    "is_composite",
    "is_known_zero",
    "map_aggregate",
    "mark_optimizer_called",
    "mode_of",
    "parts_of",
    "process_groups",
    "pytree",
    "qualified_name",
    "reduce_scatter_tensor",
    "refusals_expected",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "stands_for_real",
    "storage_key",
    "trace_update",
    "traced_node",
    "wait_tensor",
]

_MINIMUM = (2, 11)

FOLDER = os.path.dirname(torch.__file__)
"""Where torch's own source files are."""

_installed = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
if _installed < _MINIMUM:
    raise ImportError(
        f"graphopt needs torch >= {_MINIMUM[0]}.{_MINIMUM[1]}, and {torch.__version__} is installed: "
        "it relies on the joint capture with descriptors that newer releases have; run `pip install -U torch`"
    )


# --- tracing: which node of the graph under construction produced a tensor -------------------------------------------


def tracing_graph() -> fx.Graph | None:
    """The graph that the innermost tracer is building, or None outside of tracing."""
    mode = get_proxy_mode()
    return None if mode is None else mode.tracer.graph


def traced_node(tensor: torch.Tensor) -> fx.Node | None:
    """The node that stands for ``tensor`` in the graph under construction, or None where it is not traced."""
    mode = get_proxy_mode()
    if mode is None:
        return None
    if isinstance(tensor, FunctionalTensor):
        torch._sync(tensor)  # pyright: ignore[reportPrivateImportUsage]
        tensor = torch._from_functional_tensor(tensor.elem)  # pyright: ignore[reportPrivateImportUsage]
    slot = get_proxy_slot(tensor, mode.tracer, default=None)
    if slot is None:
        return None
    proxy = getattr(slot, "proxy", slot)
    return proxy.node if isinstance(proxy, fx.Proxy) else None


@contextlib.contextmanager
def as_in_eager() -> Iterator[None]:
    """While a model's Python runs under export, let it see that it is not compiled, so that it takes its eager paths.

    Models that ask (``torch.compiler.is_exporting``) often choose other kernels then, with other rounding.
    """
    import torch.compiler as compiler

    flags = ("_is_exporting_flag",)
    saved = {flag: getattr(compiler, flag) for flag in flags if hasattr(compiler, flag)}
    for flag in saved:
        setattr(compiler, flag, False)
    try:
        yield
    finally:
        for flag, value in saved.items():
            setattr(compiler, flag, value)


def is_known_zero(tensor: torch.Tensor) -> bool | None:
    """Whether a tensor that is being traced holds zeros only; None where an input or a parameter reaches it."""
    mode = get_proxy_mode()
    slot = None if mode is None else get_proxy_slot(tensor, mode.tracer, None)
    proxy = getattr(slot, "proxy", None)
    if not isinstance(proxy, fx.Proxy):
        return None
    with _disable_current_modes(), torch._C.DisableTorchFunction(), torch.no_grad():
        try:
            return not _evaluate(proxy.node, {}).any().item()
        except LookupError:
            return None


def _evaluate(node: fx.Node, known: dict[fx.Node, Any]) -> Any:
    """The value of a node.

    Raises:
        LookupError: where an input reaches it, or randomness.
    """
    if node not in known:
        if not isinstance(node.target, OpOverload) or torch.Tag.nondeterministic_seeded in node.target.tags:
            raise LookupError(f"{node} is not computed from constants")
        args, kwargs = map_aggregate(
            (node.args, node.kwargs), lambda a: _evaluate(a, known) if isinstance(a, fx.Node) else a
        )
        known[node] = node.target(*args, **kwargs)
    return known[node]


# --- custom autograd functions, kept as one call so that their own backward is what gets differentiated --------------

_ORIGINAL_APPLY = torch.autograd.Function.__dict__["apply"]


class _CustomFunction(HigherOrderOperator):
    """A call of a user's ``torch.autograd.Function`` in a forward program; the first argument is its registry key."""

    def __init__(self) -> None:
        super().__init__("graphopt_custom_function")
        self.registry: dict[str, type[torch.autograd.Function]] = {}

    def __call__(self, key: str, *args: Any) -> Any:
        return super().__call__(key, *args)

    def original(self, key: str, *args: Any) -> Any:
        """Run the user's function as autograd would, with its own forward and backward."""
        return _ORIGINAL_APPLY.__get__(None, self.registry[key])(*args)


def apply_function(cls: type[torch.autograd.Function], *args: Any) -> Any:
    """``cls.apply(*args)``, which torch leaves untyped."""
    return cls.apply(*args)


custom_function = _CustomFunction()


@custom_function.py_impl(ProxyTorchDispatchMode)
def _trace_custom_function(mode: ProxyTorchDispatchMode, key: str, *args: Any) -> Any:
    proxies = pytree.tree_map(mode.tracer.unwrap_proxy, args)
    proxy = mode.tracer.create_proxy(
        "call_function", custom_function, (key, *proxies), {}, name=key.rsplit(".", 1)[-1].lower()
    )
    with disable_proxy_modes_tracing():
        result = custom_function.original(key, *args)
    return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)


@contextlib.contextmanager
def intercept_custom_functions(check: Callable[[type, tuple[Any, ...]], None]) -> Iterator[None]:
    """While tracing, record each ``torch.autograd.Function`` a model applies as one node instead of its forward's ops.

    ``check`` sees the class and the arguments first and may raise.
    """

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        internal = cls.__module__.split(".")[0] == "torch"
        if (
            internal
            or kwargs
            or not any(isinstance(arg, torch.Tensor) and traced_node(arg) is not None for arg in args)
        ):
            return _ORIGINAL_APPLY.__get__(None, cls)(*args, **kwargs)
        check(cls, args)
        key = f"{cls.__module__}.{cls.__qualname__}"
        known = custom_function.registry.get(key)
        if known is not None and known is not cls:
            same = [name for name in custom_function.registry if name.split("#")[0] == key]
            key = next((n for n in same if custom_function.registry[n] is cls), f"{key}#{len(same)}")
        custom_function.registry[key] = cls
        return custom_function(key, *args)

    torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        torch.autograd.Function.apply = _ORIGINAL_APPLY  # type: ignore[method-assign]


@contextlib.contextmanager
def intercept_checkpoint(
    region: Callable[[Any], contextlib.AbstractContextManager[None]],
) -> Iterator[None]:
    """While tracing, run functions given to ``torch.utils.checkpoint`` once, inside ``region(context_fn)``.

    Patches the two internals that every variant of ``checkpoint`` ends in, so that references to ``checkpoint`` which
    user code bound earlier (``functools.partial``, ``from ... import``) are caught too.
    """
    import torch.utils.checkpoint as module

    class _Reentrant:
        @staticmethod
        def apply(function: Callable[..., Any], preserve: bool, *args: Any) -> Any:
            with region(None):
                return function(*args)

    def non_reentrant(
        fn: Callable[..., Any],
        preserve_rng_state: bool = True,
        context_fn: Any = module.noop_context_fn,
        *args: Any,
        **kwargs: Any,
    ) -> Iterator[None]:
        with region(None if context_fn is module.noop_context_fn else context_fn):
            yield

    saved = module.CheckpointFunction, module._checkpoint_without_reentrant_generator
    module.CheckpointFunction = _Reentrant  # type: ignore[misc,assignment]
    module._checkpoint_without_reentrant_generator = non_reentrant  # type: ignore[assignment]
    try:
        yield
    finally:
        module.CheckpointFunction, module._checkpoint_without_reentrant_generator = saved  # type: ignore[misc]


if FunctionalTensorMode not in run_and_save_rng_state.python_key_table and not any(
    getattr(key, "__name__", "") == "Functionalize" for key in run_and_save_rng_state.py_kernels
):
    # torch registers this for run_with_rng_state alone; inductor needs both.
    @run_and_save_rng_state.py_functionalize_impl
    def _functional_run_and_save(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        plain_args, plain_kwargs = context.unwrap_tensors((args, kwargs))
        with context.redispatch_to_next():
            return context.wrap_tensors(run_and_save_rng_state(op, *plain_args, **plain_kwargs))


# --- forward + backward as one graph ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AotInput:
    """What one placeholder of a joint graph is: ``kind`` is parameter, buffer, input or tangent."""

    kind: str
    target: str | int


@dataclass(frozen=True, slots=True)
class AotOutput:
    """What one output of a joint graph is: ``kind`` is output, gradient, mutation or base; ``of`` its input."""

    kind: str
    index: int | None = None
    of: AotInput | None = None


def _classify_input(desc: Any) -> AotInput:
    kind = type(desc).__name__
    if kind == "ParamAOTInput":
        return AotInput("parameter", desc.target)
    if kind == "BufferAOTInput":
        return AotInput("buffer", desc.target)
    if kind == "PlainAOTInput":
        return AotInput("input", desc.idx)
    if kind == "TangentAOTInput":
        output = _classify_output(desc.output)
        return AotInput(
            "tangent", output.index if output.kind == "output" and output.index is not None else str(desc.output)
        )
    raise CaptureError(
        f"torch made a joint graph with an input of a kind that graphopt does not know: {desc!r}",
    )


def _classify_output(desc: Any) -> AotOutput:
    kind = type(desc).__name__
    if kind == "PlainAOTOutput":
        return AotOutput("output", index=desc.idx)
    if kind == "GradAOTOutput":
        return AotOutput("gradient", of=_classify_input(desc.grad_of))
    if kind == "InputMutationAOTOutput":
        return AotOutput("mutation", of=_classify_input(desc.mutated_input))
    return AotOutput("base")  # what torch adds to rebuild outputs that are views of each other


class JointTrace:
    """A captured joint graph and what is needed to turn a rewritten version of it into a differentiable callable."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        # torch wants the stack open until compilation; but its contexts make every tensor op of the thread fake, and
        # user code runs in between. Nothing that compile() does below needs them.
        with contextlib.ExitStack() as stack, torch.enable_grad():
            self._joint = aot_export_joint_with_descriptors(
                stack, module, args, decompositions={}, keep_inference_input_mutations=True
            )
        self.graph: fx.Graph = self._joint.graph_module.graph

    def inputs(self) -> list[tuple[fx.Node, AotInput]]:
        """Each placeholder with what it stands for, in calling order."""
        return [(n, _classify_input(n.meta["desc"])) for n in self.graph.nodes if n.op == "placeholder"]

    def outputs(self) -> list[tuple[Any, AotOutput]]:
        """Each output value (a node, a constant or None) with what it stands for, in order."""
        return [(value, _classify_output(desc)) for value, desc in self._raw_outputs() if value is not None]

    def _raw_outputs(self) -> list[tuple[Any, Any]]:
        node = next(n for n in reversed(self.graph.nodes) if n.op == "output")
        flat = pytree.tree_leaves(node.args[0], is_leaf=lambda x: x is None)
        return list(zip(flat, node.meta["desc"], strict=True))

    def backward_layout(self) -> list[bool]:
        """For each input that backward may answer for, in order: whether it has a gradient."""
        values = [value is not None for value, _ in self._raw_outputs()]
        number = sum(1 for value, role in self.outputs() if role.kind != "gradient")
        return values[number:]

    @property
    def requires_grad(self) -> bool:
        """Whether there is a backward at all."""
        return any(desc.kind == "tangent" for _, desc in self.inputs())

    def parameter_order(self) -> list[str]:
        """The names of the module's parameters and buffers in the order in which the compiled callable takes them."""
        return [str(role.target) for _, role in self.inputs() if role.kind in ("parameter", "buffer")]

    def compile(
        self,
        partition: Callable[[], tuple[fx.GraphModule, fx.GraphModule]],
        forward_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
        backward_compiler: Callable[[fx.GraphModule, Sequence[Any]], Callable[[list[Any]], Any]],
    ) -> Callable[..., Any]:
        """A differentiable callable ``f(*parameters_and_buffers, *inputs)`` made of the two given halves."""

        def partition_fn(*_: Any, **__: Any) -> tuple[fx.GraphModule, fx.GraphModule]:
            return partition()

        # Donated buffers are freed by the first backward; retain_graph=True would fail.
        with functorch_config.patch(donated_buffer=False):
            compiled = aot_compile_joint_with_descriptors(
                self._joint,
                partition_fn=partition_fn,
                fw_compiler=forward_compiler,  # type: ignore[arg-type]
                bw_compiler=backward_compiler,  # type: ignore[arg-type]
            )
        # The check for retain_graph=True reads this list, and takes its absence for a donation.
        self._joint._aot_state.fw_metadata.bw_donated_idxs = []
        return compiled


# --- the optimizer's update ------------------------------------------------------------------------------------------


def trace_update(function: Callable[..., Any], inputs: Sequence[Any]) -> fx.GraphModule:
    """Trace ``function(inputs)``, in-place ops and all, on fake tensors."""

    def quiet(flat: list[Any]) -> Any:
        with torch._C.DisableTorchFunction():  # what it would record of every attribute access is half of the time
            return function(flat)

    return make_fx(quiet, tracing_mode="fake", _allow_non_fake_inputs=False)(list(inputs))


def mark_optimizer_called(optimizer: torch.optim.Optimizer) -> None:
    """Tell learning-rate schedulers that this optimizer has stepped, as ``optimizer.step()`` itself does."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def unwrapped_step(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """``optimizer.step`` without profiler hooks and without what a scheduler wrapped around it."""
    step: Any = type(optimizer).step
    while hasattr(step, "__wrapped__") and getattr(step, "hooked", False):
        step = step.__wrapped__
    return lambda: step(optimizer)


# --- what autocast does to an op --------------------------------------------------------------------------------------


def _autocast_key(device: str) -> str:
    """The name of the dispatch key under which autocast's rules for a device type are registered."""
    return f"Autocast{device.upper()}"


def has_autocast_rule(op: OpOverload, device: str) -> bool:
    """Whether ``torch.autocast`` has a rule of its own for an op on a device type (``cpu``, ``cuda``)."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), _autocast_key(device))


def is_composite(op: OpOverload) -> bool:
    """Whether an op is defined by other ops, for which autocast may have rules."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")


def qualified_name(op: OpOverload) -> str:
    """The name of an op with namespace and overload: ``aten::softmax.int``."""
    return op.name()


def autocast_operators(device: str) -> list[OpOverload]:
    """Every op for which ``torch.autocast`` has a rule on a device type, by name."""
    found = []
    for qualified in sorted(torch._C._dispatch_get_all_op_names()):
        if torch._C._dispatch_has_kernel_for_dispatch_key(qualified, _autocast_key(device)):
            namespace, _, rest = qualified.partition("::")
            name, _, overload = rest.partition(".")
            packet = getattr(getattr(torch.ops, namespace), name)
            found.append(getattr(packet, overload or "default"))
    return found


class CallRecorder(TorchDispatchMode):
    """While it is active, adds each op that reaches the device to ``calls``, with its arguments.

    Questions about a tensor's device are left out. With ``run=False`` casts alone are run; the first other op is added,
    and ``StopIteration`` raised.
    """

    def __init__(self, calls: list[tuple[OpOverload, tuple[Any, ...], dict[str, Any]]], *, run: bool = True) -> None:
        super().__init__()
        self.calls = calls
        self._run = run

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func is not torch.ops.prim.device.default:
            self.calls.append((func, args, dict(kwargs or {})))
            if not self._run and func is not torch.ops.aten._to_copy.default:
                raise StopIteration
        return func(*args, **(kwargs or {}))


@contextlib.contextmanager
def refusals_expected() -> Iterator[None]:
    """While calls are tried that may be refused, keep torch from logging each refusal as an error."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    saved = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = saved


def parts_of(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[fx.Graph, list[int]]:
    """The ops that a composite op is made of, one level down, as a graph.

    Args:
        op: for which ``is_composite`` holds.
        args: fake tensors, other values, and lists of them.
        kwargs: the same by keyword.

    Returns:
        A graph with one placeholder for each distinct tensor argument, and, for each tensor argument in order, the
        number of its placeholder.
    """
    leaves, structure = pytree.tree_flatten((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    distinct = list({id(tensor): tensor for tensor in tensors}.values())
    numbers = {id(tensor): number for number, tensor in enumerate(distinct)}

    def call(given: list[torch.Tensor]) -> Any:
        values = [given[numbers[id(leaf)]] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        inner_args, inner_kwargs = pytree.tree_unflatten(values, structure)
        return op(*inner_args, **inner_kwargs)

    traced = make_fx(call, decomposition_table={op: op.decompose}, pre_dispatch=True)(distinct)
    return traced.graph, [numbers[id(tensor)] for tensor in tensors]


# --- symbolic sizes --------------------------------------------------------------------------------------------------


def size_hint(value: Any) -> int:
    """The size a symbolic dimension had in the example inputs; plain integers are returned as they are."""
    if isinstance(value, torch.SymInt):
        node = value.node
        hint = node.hint if node.has_hint() else None
        if hint is None:
            raise ValueError(f"the size {value} depends on data and has no example value")
        return int(hint)
    return int(value)


def symbolic_float(name: str, example: float) -> Any:
    """A Python float that tracing keeps as an input instead of a constant."""
    source = ConstantSource(name)
    environment = ShapeEnv()
    symbol = environment.create_unspecified_symbol(example, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    return environment.create_symfloatnode(symbol, hint=example, source=source)


def size_range(size: torch.SymInt) -> tuple[int, int | None]:
    """The smallest and the largest value that a symbolic size may take (None: unlimited)."""
    bounds = size.node.shape_env.bound_sympy(size.node.expr)
    high = bounds.upper
    return int(bounds.lower), int(high) if high.is_Integer and high < 2**62 else None


def fake_mode(symbols: Mapping[str, int]) -> FakeTensorMode:
    """A mode for example values whose sizes are written with the given symbols (name to example value)."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)
    assert mode.shape_env is not None
    for name, hint in symbols.items():
        symbol = sympy.Symbol(name, integer=True, positive=True)
        values = getattr(mode.shape_env, "backed_var_to_val", None)  # called var_to_val before torch 2.12
        (mode.shape_env.var_to_val if values is None else values)[symbol] = sympy.Integer(hint)
        mode.shape_env.var_to_range[symbol] = ValueRanges(2, int_oo)
    return mode


def symbolic_size(mode: FakeTensorMode, expression: str, hint: int) -> Any:
    """A symbolic integer written as ``expression``, with an example value; the inverse of printing one."""
    assert mode.shape_env is not None
    symbols = {str(symbol): symbol for symbol in mode.shape_env.var_to_range}
    return mode.shape_env.create_symintnode(sympy.parse_expr(expression, local_dict=symbols), hint=hint)


# --- code generation and compilers -----------------------------------------------------------------------------------


class BoxedCodeGen(CodeGen):
    """Generates a ``forward`` that empties the list it is given, so that arguments die at their last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **_: Any) -> str:
        """The head of the function, which takes its arguments out of one list."""
        names = [name.split(":")[0].split("=")[0].strip() for name in free_vars if name.strip() != "self"]
        lines = [f"def {self._func_name}(self, _boxed_args){maybe_return_annotation}:"]
        if names:
            lines.append(f"    {', '.join(names)}, = _boxed_args")
        lines.append("    _boxed_args.clear()")
        return "\n".join(lines)


@contextlib.contextmanager
def _traceable_generator_states() -> Iterator[None]:
    """While inductor traces a program again, let saved generator states be example values.

    torch's own rule for tracing the op returns the machine's real state, which does not mix with example values.
    """

    def value(op: Any, *args: Any, **kwargs: Any) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        devices = [str(t.device) for t in tensors] + [str(kwargs.get("device") or "cpu")]
        state = torch.cuda.get_rng_state() if devices[0].startswith("cuda") else torch.get_rng_state()
        return torch.empty(tuple(state.shape), dtype=torch.uint8), op(*args, **kwargs)

    def trace(mode: ProxyTorchDispatchMode, op: Any, *args: Any, **kwargs: Any) -> Any:
        fake = detect_fake_mode((args, kwargs))
        with fake if fake is not None else contextlib.nullcontext():
            result = value(op, *args, **kwargs)
        proxy_args, proxy_kwargs = pytree.tree_map(mode.tracer.unwrap_proxy, ((op, *args), kwargs))
        proxy = mode.tracer.create_proxy("call_function", run_and_save_rng_state, proxy_args, proxy_kwargs)
        return track_tensor_tree(result, proxy, constant=None, tracer=mode.tracer)

    tables: Any = ((registered_hop_fake_fns, run_and_save_rng_state, value),
              (run_and_save_rng_state.python_key_table, ProxyTorchDispatchMode, trace))  # fmt: skip
    saved = [table.get(key) for table, key, _ in tables]
    for table, key, rule in tables:
        table[key] = rule
    run_and_save_rng_state._dispatch_cache.clear()
    try:
        yield
    finally:
        for (table, key, _), old in zip(tables, saved, strict=True):
            table[key] = old
        run_and_save_rng_state._dispatch_cache.clear()


@dataclass(frozen=True, slots=True)
class InductorCode:
    """What inductor made of a graph.

    Attributes:
        run: takes the inputs in a list, which it empties, and drops each at its last use.
        generated: inductor's own callable under ``run``; it takes the values of ``extra``, then the inputs.
        extra: example values of the tensors that the graph holds itself.
    """

    run: Callable[[list[Any]], Any]
    generated: Any
    extra: tuple[Any, ...]


def compile_with_inductor(module: fx.GraphModule, inputs: Sequence[Any], owned: Container[int]) -> InductorCode:
    """Compile an aten graph with inductor, in the order in which it stands as far as inductor keeps it.

    Random ops stay torch's own, so that they draw what eager draws; strides are not padded. Inductor frees what it is
    given at the last use where nobody else holds it: hence one list of inputs, marked as one to steal from.

    Args:
        module: takes one list of inputs.
        inputs: example values without data.
        owned: the positions of inputs that nobody else holds when the code runs.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    found: list[tuple[Any, tuple[Any, ...]]] = []

    def compile_inner(graph: fx.GraphModule, examples: Sequence[Any], **options: Any) -> Any:
        extra = len(examples) - len(inputs)
        for index, node in enumerate(graph.graph.find_nodes(op="placeholder")):
            if index - extra in owned:  # inductor takes inputs that are called arg… for ones that cannot be freed
                node.target = f"saved_{index}"
                node._rename(f"saved_{index}")
        graph.recompile()
        options["is_inference"] = False  # for inference, ops are moved to their first use
        code = compile_fx_inner(graph, examples, **options)
        found.append((code, tuple(examples[:extra])))
        return code

    (given,) = module.graph.find_nodes(op="placeholder")
    given.meta["steal_arg"] = True
    inputs = _cacheable(inputs)
    # A capture that is being compiled keeps its own notes on the calling convention; inductor must not read them.
    with (
        tracing(None),
        _traceable_generator_states(),
        functorch_config.patch(enable_autograd_cache=False),  # it would not ask compile_inner
        config.patch({"fallback_random": True, "comprehensive_padding": False}),
    ):
        run: Any = compile_fx(module, [list(inputs)], inner_compile=compile_inner)  # type: ignore[list-item]
    ((generated, extra),) = found
    return InductorCode(run, generated, extra)


def example_twins(values: Sequence[Any], mode: contextlib.AbstractContextManager[Any]) -> list[Any]:
    """Example values like the given ones that nothing else refers to; what shared a storage shares one again.

    Args:
        values: tensors without data, and others, which are returned as they are.
        mode: in which the results compute.
    """
    storages: dict[int, torch.Tensor] = {}

    def twin(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        key = storage_key(value)
        if key not in storages:
            count = value.untyped_storage().nbytes() // value.element_size()
            storages[key] = torch.empty(count, dtype=value.dtype, device=value.device)
        empty = torch.empty(0, dtype=value.dtype, device=value.device)
        return empty.set_(storages[key].untyped_storage(), value.storage_offset(), value.shape, value.stride())  # type: ignore[call-overload]

    with mode:
        return [twin(value) for value in values]


def _cacheable(inputs: Sequence[Any]) -> Sequence[Any]:
    """The same example values in a mode with an environment of sizes: inductor caches nothing without one.

    Where sizes are symbolic there is one already.
    """
    mode = detect_fake_mode(inputs)
    if mode is None or mode.shape_env is not None or not all(isinstance(value, torch.Tensor) for value in inputs):
        return inputs
    return example_twins(inputs, FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True))


def generated_function(code: InductorCode) -> Callable[..., Any]:
    """The Python function that inductor generated; it takes the values of ``extra`` and the inputs in one list."""
    runner = getattr(code.generated, "compiled_fn_runner", None)
    return getattr(code.generated, "current_callable", code.generated) if runner is None else runner.call  # type: ignore[no-any-return]


def mode_of(values: Sequence[Any]) -> contextlib.AbstractContextManager[Any]:
    """The mode in which example values compute; does nothing where none of them is one."""
    return detect_fake_mode(values) or contextlib.nullcontext()


def stands_for_real(tensor: torch.Tensor) -> bool:
    """Whether an example value, or what it is a view of, was made for a tensor with data (a parameter, an input)."""
    if not isinstance(tensor, FakeTensor):
        return True
    known = tensor.fake_mode.fake_tensor_converter.meta_converter.storage_memo
    return any(storage._cdata == storage_key(tensor) for storage in known.values())


def storage_key(tensor: torch.Tensor) -> int:
    """A number that tells storages apart as long as they live."""
    return tensor.untyped_storage()._cdata


# --- the CPU allocator's own events ----------------------------------------------------------------------------------


def profile_memory() -> torch.profiler.profile:
    """A profile of the CPU that records every allocation and release."""
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # the profiler otherwise announces itself on stderr
    return torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)


def peaks_between_marks(profile: Any, prefix: str) -> dict[int, int]:
    """For every ``record_function`` mark called ``prefix<number>``: its peak of CPU bytes above what it left behind."""
    events = profile.profiler.kineto_results.events()
    marks = sorted(
        (event.start_ns(), event.start_ns() + event.duration_ns(), int(event.name().removeprefix(prefix)))
        for event in events
        if event.name().startswith(prefix)
    )
    changes = iter([(when, count) for when, where, count in allocator_events(profile) if where == "cpu"])
    peaks: dict[int, int] = {}
    when, count = next(changes, (None, 0))
    for start, end, number in marks:
        alive = peak = 0
        while when is not None and when <= end:
            if when >= start:
                alive += count
                peak = max(peak, alive)
            when, count = next(changes, (None, 0))
        peaks[number] = peak - alive
    return peaks


def allocator_events(profile: Any) -> list[tuple[int, str, int]]:
    """``(time in ns, device type, signed bytes)`` of every allocation that a profile saw, and its release, in order.

    Releases of blocks from before the profile are left out: torch reports them only where an earlier profile happened
    to see a block at the same address, and with that block's size.
    """
    found = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending += event.children
        if event.tag == _EventType.Allocation:
            block = event.extra_fields
            found.append((event.start_time_ns, block.device.type, block.ptr, block.alloc_size))
    found.sort(key=lambda event: event[0])
    held: Counter[tuple[str, int, int]] = (
        Counter()
    )  # with sizes: another thread may take an address before it is reported
    events = []
    for when, where, address, count in found:
        if count > 0:
            held[where, address, count] += 1
            events.append((when, where, count))
        elif held[where, address, -count]:
            held[where, address, -count] -= 1
            events.append((when, where, count))
    return events


def process_groups() -> dict[str, Any]:
    """Every process group that this process belongs to, by name; torch has no public way to look one up."""
    from torch.distributed.distributed_c10d import _world

    return {name: group for group, name in _world.pg_names.items()}


def default_store() -> Any:
    """The store of the default process group, typed loosely: torch's stubs leave ``clone`` out.

    Raises:
        RuntimeError: where its backend has none.
    """
    from torch.distributed.distributed_c10d import _get_default_store

    store = _get_default_store()
    if store is None:
        raise RuntimeError("this process group has no store")
    return store


def is_tcp_store(store: Any) -> bool:
    """Whether a store lives in one process that the others reach over TCP; torch exports the classes to no checker."""
    from torch._C._distributed_c10d import PrefixStore, TCPStore

    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return isinstance(store, TCPStore)


def cpu_computes_in(dtype: torch.dtype) -> bool:
    """Whether this CPU has instructions for products in a 16-bit dtype; without, they are slower than float32's."""
    name = {torch.bfloat16: "_is_mkldnn_bf16_supported", torch.float16: "_is_mkldnn_fp16_supported"}[dtype]
    supported = getattr(torch.ops.mkldnn, name, None) if torch.backends.mkldnn.is_available() else None
    return bool(supported is not None and supported())


all_gather_into_tensor = torch.ops._c10d_functional.all_gather_into_tensor.default
all_gather_into_tensor_out = torch.ops._c10d_functional.all_gather_into_tensor_out.default
all_reduce = torch.ops._c10d_functional.all_reduce.default
all_reduce_ = torch.ops._c10d_functional.all_reduce_.default
all_to_all_single = torch.ops._c10d_functional.all_to_all_single.default
broadcast = torch.ops._c10d_functional.broadcast.default
broadcast_ = torch.ops._c10d_functional.broadcast_.default
reduce_scatter_tensor = torch.ops._c10d_functional.reduce_scatter_tensor.default
wait_tensor = torch.ops._c10d_functional.wait_tensor.default
