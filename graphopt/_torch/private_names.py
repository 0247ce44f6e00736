"""What graphopt needs of torch's private names, by feature, and the error where the installed torch lacks one.

What every program needs is checked when the first name of the folder is used, all of it at once, and before the files
that have the names are imported (``every_name.py``); what only some programs need is checked by ``require`` when it is
used. Both cost microseconds: names are looked up in modules that are imported in any case.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from graphopt._torch.versions import INSTALL, KNOWN
from graphopt.errors import TorchVersionError

__all__ = [
    "AUTOCAST",
    "CHECKPOINTS",
    "COLLECTIVES",
    "DISTRIBUTED",
    "FAKE_RANKS",
    "FULLY_SHARDED",
    "GROUPS",
    "INDUCTOR",
    "JOINT",
    "MEMORY",
    "MESSAGES",
    "ON_IMPORT",
    "ON_USE",
    "PARTITIONER",
    "PARTS",
    "VALUES",
    "Feature",
    "attribute",
    "require",
    "require_all",
]


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that graphopt does with private names of torch.

    Attributes:
        what: it does, for people.
        names: what it needs of each module, separated by spaces; of names joined by ``|`` any one will do.
    """

    what: str
    names: Mapping[str, str]


VALUES = Feature(
    "example values of tensors and of sizes",
    {
        "torch": "UntypedStorage._cdata",
        "torch._dispatch.python": "enable_python_dispatcher",
        "torch._dynamo.source": "ConstantSource",
        "torch._guards": "detect_fake_mode",
        "torch._subclasses.fake_tensor": (
            "DataDependentOutputException DynamicOutputShapeException FakeTensor FakeTensorMode"
        ),
        "torch.fx.experimental.symbolic_shapes": (
            "DimDynamic.DYNAMIC GuardOnDataDependentSymNode ShapeEnv._get_sloc ShapeEnv.bound_sympy "
            "ShapeEnv.create_symfloatnode ShapeEnv.create_symintnode ShapeEnv.create_unspecified_symbol "
            "ShapeEnv.replace ValueRangesSLoc"
        ),
        "torch.utils._sympy.numbers": "int_oo",
        "torch.utils._sympy.value_ranges": "ValueRanges",
    },
)

TRACING = Feature(
    "tracing models, losses and optimizers",
    {
        "torch": (
            "_C.DispatchKey.Autograd _C.DispatchKey.CompositeImplicitAutograd "
            "_C._dispatch_has_kernel_for_dispatch_key _C._get_mkldnn_enabled _C._set_mkldnn_enabled "
            "_C.DisableTorchFunction _C.DisableTorchFunctionSubclass "
            "_from_functional_tensor _library _sync ops.aten._linalg_check_errors.default "
            "ops.aten._to_copy.default"
        ),
        "torch._decomp": "decomposition_table",
        "torch._prims_common": "suggest_memory_format",
        "torch._ops": "HigherOrderOperator.py_impl OpOverload OpOverloadPacket",
        "torch.autograd.function": "_SingleLevelFunction",
        "torch._subclasses.fake_impls": "op_implementations_checks",
        "torch._subclasses.fake_tensor": "FakeTensorMode.cache_clear",
        "torch._subclasses.functional_tensor": "FunctionalTensor",
        "torch.fx.experimental.proxy_tensor": (
            "ProxyTorchDispatchMode disable_proxy_modes_tracing get_proxy_mode get_proxy_slot make_fx track_tensor_tree"
        ),
        "torch.fx.node": "has_side_effect map_aggregate",
        "torch.optim.optimizer": "_global_optimizer_post_hooks _global_optimizer_pre_hooks",
        "torch.utils._python_dispatch": "TorchDispatchMode _disable_current_modes",
        "torch.utils._pytree": (
            "keystr tree_flatten tree_flatten_with_path tree_leaves tree_map tree_map_only tree_unflatten"
        ),
    },
)

JOINT = Feature(
    "forward and backward as one program",
    {
        "torch._functorch.aot_autograd": "aot_compile_joint_with_descriptors aot_export_joint_with_descriptors",
        "torch._functorch._aot_autograd.descriptors": (
            "BufferAOTInput GradAOTOutput InputMutationAOTOutput ParamAOTInput PlainAOTInput PlainAOTOutput "
            "TangentAOTInput"
        ),
        "torch._functorch._aot_autograd.schemas": (
            "MemoryFormatMeta OutputAliasInfo PlainTensorMeta ViewAndMutationMeta.bw_donated_idxs"
        ),
        "torch._functorch.config": "donated_buffer patch",
        "torch._functorch._aot_autograd.runtime_wrappers": "",
        "torch.autograd": "_engine_run_backward",
        "torch.fx._lazy_graph_module": "_LazyGraphModule.force_recompile",
        "torch.fx.graph": "CodeGen.gen_fn_def",
        "torch.utils._python_dispatch": "_get_current_dispatch_mode _pop_mode_temporarily",
    },
)

# A name beside one that is needed anyway makes a check faster where torch has it, and nothing fails without it.
CHANGES = Feature(
    "noticing that something changed since a program was captured",
    {
        "torch._C": (
            "_dynamo.guards.TensorGuards.check _dynamo.guards.RootGuardManager|_dynamo.guards.dict_version "
            "_dynamo.guards.dict_version _functorch.is_batchedtensor "
            "_functorch.is_functorch_wrapped_tensor _functorch.is_legacy_batchedtensor "
            "_functorch.peek_interpreter_stack _functorch.get_dynamic_layer_stack_depth "
            "_functorch.pop_dynamic_layer_stack_and_undo_to_depth _autograd._saved_tensors_hooks_enable "
            "_autograd._saved_tensors_hooks_is_enabled _enter_dual_level _exit_dual_level _is_fwd_grad_enabled "
            "_set_fwd_grad_enabled "
            "_get_cudnn_sdp_enabled _len_torch_dispatch_stack _len_torch_function_stack "
            "_get_flash_sdp_enabled _get_math_sdp_enabled _get_mem_efficient_sdp_enabled _get_mkldnn_enabled"
        ),
        "torch._dynamo.guards": "GuardManagerType.GUARD_MANAGER|GuardManager",
        "torch.nn.modules.module": (
            "_global_backward_hooks _global_backward_pre_hooks _global_forward_hooks _global_forward_pre_hooks"
        ),
        "torch.autograd.forward_ad": "_current_level",
        "torch.nn.utils.parametrize": "_cache _cache_enabled",
        "torch.overrides": "_get_current_function_mode_stack _pop_mode _push_mode",
        "torch.utils._device": "DeviceContext",
        "torch.utils._python_dispatch": "_get_current_dispatch_mode_stack",
        "torch.utils.hooks": "RemovableHandle.next_id",
    },
)

RANDOMNESS = Feature(
    "the same random numbers in what is recomputed",
    {
        "torch._C": "DispatchKey.BackendSelect DispatchKey.CUDA",
        "torch._higher_order_ops.utils": "registered_hop_fake_fns",
        "torch._prims.rng_prims": (
            "run_and_save_rng_state._dispatch_cache run_and_save_rng_state.py_functionalize_impl "
            "run_and_save_rng_state.py_kernels run_and_save_rng_state.python_key_table run_with_rng_state "
            "run_with_rng_state._dispatch_cache run_with_rng_state.py_kernels"
        ),
        "torch._subclasses.functional_tensor": "FunctionalTensorMode",
    },
)

OPS = Feature(
    "looking up ops and their overloads",
    {
        "torch": "ops.aten.add._qualified_op_name",
        "torch._C": "_jit_get_schemas_for_operator _jit_resolve_packet",
        "torch._ops": "_higher_order_ops",
    },
)

COLLECTIVES = Feature(
    "exchanges between ranks as ops of a program",
    {
        "torch.ops": (
            "_c10d_functional.all_gather_into_tensor.default _c10d_functional.all_gather_into_tensor_out.default "
            "_c10d_functional.all_reduce.default _c10d_functional.all_reduce_.default "
            "_c10d_functional.all_to_all_single.default "
            "_c10d_functional.broadcast.default _c10d_functional.broadcast_.default "
            "_c10d_functional.reduce_scatter_tensor.default _c10d_functional.wait_tensor.default"
        ),
    },
)

REGIONS = Feature(
    "regions without gradients and under autocast",
    {
        "torch._C": "_set_grad_enabled",
        "torch._export.passes.replace_autocast_with_hop_pass": "replace_autocast_with_hop_pass",
        "torch._export.passes.replace_set_grad_with_hop_pass": "replace_set_grad_with_hop_pass",
        "torch.amp.autocast_mode": "_enter_autocast _exit_autocast",
    },
)

ON_IMPORT = (VALUES, REGIONS, TRACING, JOINT, CHANGES, RANDOMNESS, OPS, COLLECTIVES)

CHECKPOINTS = Feature(
    "recognising torch.utils.checkpoint in a model",
    {
        "torch.utils.checkpoint": (
            "CheckpointFunction noop_context_fn "
            "_checkpoint_without_reentrant_generator_impl|_checkpoint_without_reentrant_generator"
        ),
    },
)

PARTS = Feature(
    "models that are captured in parts",
    {
        "torch._dynamo.config": (
            "accumulated_recompile_limit patch recompile_limit "
            "rewrite_assert_with_torch_assert skip_nnmodule_hook_guards suppress_errors trace_numpy"
        ),
        "torch._dynamo.source": "GlobalStateSource",
        "torch._guards": "CompileContext.current_compile_id Guard TracingContext.try_get",
    },
)

PARTITIONER = Feature(
    "a partitioner for the inductor of torch.compile",
    {
        "torch._functorch._aot_autograd.graph_compile": "is_opaque_node",
        "torch._functorch.compile_utils": "fx_graph_cse raise_getitems",
        "torch._functorch.config": "cse unsafe_allow_optimization_of_collectives",
        "torch._functorch.partitioners": (
            "_extract_fwd_bwd_modules choose_saved_values_set classify_nodes default_partition "
            "force_save_bw_mutation_src force_save_collectives force_save_effectful_ops get_default_op_list "
            "reordering_to_mimic_autograd_engine thread_graphsafe_rng_from_hops"
        ),
        "torch._inductor.config": "custom_partitioner_fn",
        "torch._inductor.custom_graph_pass": "CustomPartitionerFn",
    },
)

INDUCTOR = Feature(
    'the backend "inductor"',
    {
        "torch._functorch.config": "enable_autograd_cache patch",
        "torch._guards": "tracing",
        "torch._inductor.compile_fx": "compile_fx compile_fx_inner",
        "torch._inductor.config": "comprehensive_padding fallback_random patch",
        "torch.fx": "Node._rename",
    },
)

AUTOCAST = Feature(
    "the rules of autocast",
    {"torch._C": "_dispatch_get_all_op_names _dispatch_has_kernel_for_dispatch_key"},
)

MEMORY = Feature(
    "measuring memory on the CPU",
    {
        "torch.autograd": "_profiler_enabled",
        "torch._C": (
            "_autograd._ProfilerResult.events _autograd._ProfilerResult.experimental_event_tree "
            "_profiler._EventType.Allocation _profiler._ExtraFields_Allocation.alloc_size "
            "_profiler._ExtraFields_Allocation.device _profiler._ExtraFields_Allocation.ptr "
            "_profiler._ProfilerEvent.children _profiler._ProfilerEvent.extra_fields "
            "_profiler._ProfilerEvent.start_time_ns _profiler._ProfilerEvent.tag"
        ),
    },
)

GROUPS = Feature(
    "process groups and their stores",
    {
        "torch._C._distributed_c10d": "PrefixStore.underlying_store TCPStore",
        "torch.distributed.distributed_c10d": "_get_default_store _world.pg_names",
    },
)

ABORT = Feature(
    "process groups whose exchanges are aborted",
    {"torch._C._distributed_c10d": "ProcessGroup.abort"},
)

MESSAGES = Feature(
    "exchanges over gloo from rank to rank",
    {"torch._C._distributed_c10d": "ProcessGroup.recv ProcessGroup.send Work.wait _register_work"},
)

FAKE_RANKS = Feature(
    "plans for several devices without their processes",
    {"torch.testing._internal.distributed.fake_pg": "FakeStore"},
)

FULLY_SHARDED = Feature(
    "models after fully_shard",
    {
        "torch.distributed._composable_state": "_insert_module_state",
        "torch.distributed.fsdp._fully_shard._fsdp_state": "FSDPState._lazy_init FSDPState._pre_forward "
        "FSDPState._post_forward FSDPState._cast_forward_inputs FSDPState._cast_output_dtype",
        "torch.distributed.fsdp._fully_shard._fsdp_param_group": "FSDPParamGroup._reshard_after_forward "
        "FSDPParamGroup._is_hsdp FSDPParamGroup._to_sharded "
        "FSDPParamGroup._reduce_scatter_process_group FSDPParamGroup._all_reduce_process_group",
        "torch.distributed.fsdp._fully_shard._fsdp_param": "FSDPParam._sharded_local_tensor",
        "torch.distributed.fsdp._fully_shard._fsdp_collectives": "_get_gradient_divide_factors",
    },
)

DISTRIBUTED = Feature(
    "models whose parameters are distributed tensors",
    {"torch.distributed.tensor._dtensor_spec": "DTensorSpec"},
)

ON_USE = (
    CHECKPOINTS, PARTS, PARTITIONER, INDUCTOR, AUTOCAST, MEMORY, GROUPS, ABORT, MESSAGES, FAKE_RANKS, FULLY_SHARDED,
    DISTRIBUTED,
)  # fmt: skip


def require(feature: Feature) -> None:
    """Check that the installed torch has what a feature needs.

    Raises:
        TorchVersionError: where it lacks any of it, with all that it lacks.
    """
    require_all([feature])


def require_all(features: Iterable[Feature]) -> None:
    """Check several features as ``require`` does one, and report whatever is missing at once."""
    missing = [(name, feature) for feature in features for name in _missing(feature)]
    if missing:
        raise _error(missing)


def attribute(value: Any, path: str, feature: Feature) -> Any:
    """``value.a.b`` for the path ``a.b``, of attributes that objects get one by one, which no class tells beforehand.

    Args:
        value: an object of torch's.
        path: names joined by dots; of names joined by ``|`` the first that is there is taken.
        feature: that needs the attribute.

    Raises:
        TorchVersionError: where an attribute is missing.
    """
    for part in path.split("."):
        name = next((name for name in part.split("|") if hasattr(value, name)), None)
        if name is None:
            raise _error([(f"{type(value).__module__}.{type(value).__qualname__}.{part}", feature)])
        value = getattr(value, name)
    return value


def _missing(feature: Feature) -> list[str]:
    """The dotted names that the installed torch lacks; a module that it lacks stands for all of its names."""
    found = []
    for path, names in feature.names.items():
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{path}.".startswith(f"{error.name}."):
                raise  # torch has it, and something else is not installed
            found.append(path)
            continue
        found += [f"{path}.{name}" for name in names.split() if not any(_has(module, n) for n in name.split("|"))]
    return found


def _has(module: Any, name: str) -> bool:
    try:
        attrgetter(name)(module)
    except AttributeError:
        return False
    return True


def _error(missing: Iterable[tuple[str, Feature]]) -> TorchVersionError:
    lines = [
        f"torch {torch.__version__} lacks {name.replace('|', ' or ')}, which graphopt needs for {feature.what}"
        for name, feature in missing
    ]
    advice = f"  what to do: run `{INSTALL}`; graphopt is known to work with torch {KNOWN}"
    return TorchVersionError("\n".join([*lines, advice]))
