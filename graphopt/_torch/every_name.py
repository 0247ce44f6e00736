"""Every name of the folder; to import this file imports the private modules of torch that all programs need."""

from __future__ import annotations

import torch.utils._pytree as pytree
from torch._ops import HigherOrderOperator as HigherOrderOperator
from torch._ops import OpOverload as OpOverload
from torch._subclasses.fake_tensor import FakeTensor as FakeTensor
from torch._subclasses.fake_tensor import FakeTensorMode as FakeTensorMode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode as GuardOnDataDependentSymNode
from torch.fx.node import map_aggregate as map_aggregate

from graphopt._torch.c10d import abort_group as abort_group
from graphopt._torch.c10d import all_gather_into_tensor as all_gather_into_tensor
from graphopt._torch.c10d import all_gather_into_tensor_out as all_gather_into_tensor_out
from graphopt._torch.c10d import all_reduce as all_reduce
from graphopt._torch.c10d import all_reduce_ as all_reduce_
from graphopt._torch.c10d import all_to_all_op as all_to_all_op
from graphopt._torch.c10d import all_to_all_single as all_to_all_single
from graphopt._torch.c10d import broadcast as broadcast
from graphopt._torch.c10d import broadcast_ as broadcast_
from graphopt._torch.c10d import collectives_draw_apart as collectives_draw_apart
from graphopt._torch.c10d import default_store as default_store
from graphopt._torch.c10d import group_on_host as group_on_host
from graphopt._torch.c10d import is_gloo as is_gloo
from graphopt._torch.c10d import is_tcp_store as is_tcp_store
from graphopt._torch.c10d import process_groups as process_groups
from graphopt._torch.c10d import ranks_without_network as ranks_without_network
from graphopt._torch.c10d import reduce_scatter_tensor as reduce_scatter_tensor
from graphopt._torch.c10d import start_receiving as start_receiving
from graphopt._torch.c10d import start_sending as start_sending
from graphopt._torch.c10d import wait_tensor as wait_tensor
from graphopt._torch.c10d import wait_with as wait_with
from graphopt._torch.c10d import work_of as work_of
from graphopt._torch.capture.aot_autograd import AotInput as AotInput
from graphopt._torch.capture.aot_autograd import AotOutput as AotOutput
from graphopt._torch.capture.aot_autograd import GradientRoutes as GradientRoutes
from graphopt._torch.capture.aot_autograd import JointTrace as JointTrace
from graphopt._torch.capture.autograd_engine import inner_gradients as inner_gradients
from graphopt._torch.capture.autograd_engine import intercept_inner_gradients as intercept_inner_gradients
from graphopt._torch.capture.custom_functions import apply_function as apply_function
from graphopt._torch.capture.custom_functions import custom_function as custom_function
from graphopt._torch.capture.custom_functions import intercept_custom_functions as intercept_custom_functions
from graphopt._torch.capture.custom_functions import region_of as region_of
from graphopt._torch.capture.custom_functions import traced_as_one as traced_as_one
from graphopt._torch.capture.export_regions import AUTOCAST_BEGINS as AUTOCAST_BEGINS
from graphopt._torch.capture.export_regions import AUTOCAST_ENDS as AUTOCAST_ENDS
from graphopt._torch.capture.export_regions import SETS_GRAD_MODE as SETS_GRAD_MODE
from graphopt._torch.capture.export_regions import without_regions as without_regions
from graphopt._torch.capture.fake_tensors import NEEDS_VALUES as NEEDS_VALUES
from graphopt._torch.capture.fake_tensors import StandIn as StandIn
from graphopt._torch.capture.fake_tensors import as_traced as as_traced
from graphopt._torch.capture.fake_tensors import device_kind as device_kind
from graphopt._torch.capture.fake_tensors import example_twins as example_twins
from graphopt._torch.capture.fake_tensors import has_no_data as has_no_data
from graphopt._torch.capture.fake_tensors import mode_of as mode_of
from graphopt._torch.capture.fake_tensors import stand_in_mode as stand_in_mode
from graphopt._torch.capture.fake_tensors import stand_in_of as stand_in_of
from graphopt._torch.capture.fake_tensors import stands_for_real as stands_for_real
from graphopt._torch.capture.fake_tensors import storage_key as storage_key
from graphopt._torch.capture.generator_states import run_and_save_rng_state as run_and_save_rng_state
from graphopt._torch.capture.generator_states import run_with_rng_state as run_with_rng_state
from graphopt._torch.capture.interception import as_in_eager as as_in_eager
from graphopt._torch.capture.interception import as_seen_by_a_trace as as_seen_by_a_trace
from graphopt._torch.capture.interception import hooks_of_users_modules as hooks_of_users_modules
from graphopt._torch.capture.interception import intercept_checkpoint as intercept_checkpoint
from graphopt._torch.capture.interception import parametrizations_are_cached as parametrizations_are_cached
from graphopt._torch.capture.interception import parametrized_apart as parametrized_apart
from graphopt._torch.capture.interception import set_aside_in_bodies as set_aside_in_bodies
from graphopt._torch.capture.optimizer_tracing import has_global_step_hooks as has_global_step_hooks
from graphopt._torch.capture.optimizer_tracing import mark_optimizer_called as mark_optimizer_called
from graphopt._torch.capture.optimizer_tracing import trace_update as trace_update
from graphopt._torch.capture.optimizer_tracing import unwrapped_step as unwrapped_step
from graphopt._torch.capture.real_writes import ExchangeMetError as ExchangeMetError
from graphopt._torch.capture.real_writes import RealWrites as RealWrites
from graphopt._torch.capture.real_writes import TrialWrites as TrialWrites
from graphopt._torch.capture.second_derivatives import before_compiled_backward as before_compiled_backward
from graphopt._torch.capture.second_derivatives import connect_second_derivatives as connect_second_derivatives
from graphopt._torch.capture.second_derivatives import explain_second_derivatives as explain_second_derivatives
from graphopt._torch.capture.symbolic_sizes import SymbolRange as SymbolRange
from graphopt._torch.capture.symbolic_sizes import broken_guard as broken_guard
from graphopt._torch.capture.symbolic_sizes import evaluate_number as evaluate_number
from graphopt._torch.capture.symbolic_sizes import example_tensor as example_tensor
from graphopt._torch.capture.symbolic_sizes import fake_mode as fake_mode
from graphopt._torch.capture.symbolic_sizes import fixed_size_guard as fixed_size_guard
from graphopt._torch.capture.symbolic_sizes import guard_texts as guard_texts
from graphopt._torch.capture.symbolic_sizes import is_of_sizes as is_of_sizes
from graphopt._torch.capture.symbolic_sizes import number_hint as number_hint
from graphopt._torch.capture.symbolic_sizes import open_symbols as open_symbols
from graphopt._torch.capture.symbolic_sizes import size_hint as size_hint
from graphopt._torch.capture.symbolic_sizes import size_range as size_range
from graphopt._torch.capture.symbolic_sizes import size_symbols as size_symbols
from graphopt._torch.capture.symbolic_sizes import sizes_taken_as as sizes_taken_as
from graphopt._torch.capture.symbolic_sizes import symbolic_float as symbolic_float
from graphopt._torch.capture.symbolic_sizes import symbolic_size as symbolic_size
from graphopt._torch.capture.symbolic_sizes import taken_sizes as taken_sizes
from graphopt._torch.capture.traced_tensors import is_written as is_written
from graphopt._torch.capture.traced_tensors import known_value as known_value
from graphopt._torch.capture.traced_tensors import outside_of_tracing as outside_of_tracing
from graphopt._torch.capture.traced_tensors import traced_node as traced_node
from graphopt._torch.capture.traced_tensors import tracing_graph as tracing_graph
from graphopt._torch.compilers.compiled_calls import BoxedCodeGen as BoxedCodeGen
from graphopt._torch.compilers.compiled_calls import CompiledCall as CompiledCall
from graphopt._torch.compilers.compiled_calls import LazyGraphModule as LazyGraphModule
from graphopt._torch.compilers.compiled_calls import compiled_call as compiled_call
from graphopt._torch.compilers.compiled_calls import compiled_with as compiled_with
from graphopt._torch.compilers.compiled_calls import whole_function as whole_function
from graphopt._torch.compilers.dynamo import MOST_GRAPHS as MOST_GRAPHS
from graphopt._torch.compilers.dynamo import cut as cut
from graphopt._torch.compilers.dynamo import cut_as_in_eager as cut_as_in_eager
from graphopt._torch.compilers.dynamo import function_that_is_cut as function_that_is_cut
from graphopt._torch.compilers.dynamo import guard_by as guard_by
from graphopt._torch.compilers.dynamo import guard_hooks as guard_hooks
from graphopt._torch.compilers.dynamo import input_paths as input_paths
from graphopt._torch.compilers.dynamo import input_sources as input_sources
from graphopt._torch.compilers.dynamo import number_places as number_places
from graphopt._torch.compilers.dynamo import tell_of_limits as tell_of_limits
from graphopt._torch.compilers.dynamo import with_paths as with_paths
from graphopt._torch.compilers.inductor_code import InductorCode as InductorCode
from graphopt._torch.compilers.inductor_code import compile_with_inductor as compile_with_inductor
from graphopt._torch.compilers.inductor_code import generated_function as generated_function
from graphopt._torch.compilers.partitioning import JointSplit as JointSplit
from graphopt._torch.compilers.partitioning import as_partitioner as as_partitioner
from graphopt._torch.compilers.partitioning import is_free_to_go as is_free_to_go
from graphopt._torch.compilers.partitioning import is_fusible as is_fusible
from graphopt._torch.distributed_tensors import PlacementsOfGradient as PlacementsOfGradient
from graphopt._torch.distributed_tensors import distributed_from as distributed_from
from graphopt._torch.distributed_tensors import gradient_like as gradient_like
from graphopt._torch.distributed_tensors import is_distributed as is_distributed
from graphopt._torch.distributed_tensors import local_from as local_from
from graphopt._torch.distributed_tensors import local_part as local_part
from graphopt._torch.distributed_tensors import local_result as local_result
from graphopt._torch.distributed_tensors import placements_of_gradient as placements_of_gradient
from graphopt._torch.facts.change_detection import DictionariesUnchanged as DictionariesUnchanged
from graphopt._torch.facts.change_detection import TensorsUnchanged as TensorsUnchanged
from graphopt._torch.facts.change_detection import callers_modes as callers_modes
from graphopt._torch.facts.change_detection import default_device as default_device
from graphopt._torch.facts.change_detection import dict_version as dict_version
from graphopt._torch.facts.change_detection import global_module_hooks as global_module_hooks
from graphopt._torch.facts.change_detection import has_global_backward_hooks as has_global_backward_hooks
from graphopt._torch.facts.change_detection import hooks_added as hooks_added
from graphopt._torch.facts.change_detection import in_forward_mode as in_forward_mode
from graphopt._torch.facts.change_detection import in_function_transform as in_function_transform
from graphopt._torch.facts.change_detection import is_batched as is_batched
from graphopt._torch.facts.change_detection import is_plain_tensor as is_plain_tensor
from graphopt._torch.facts.change_detection import kernel_choices as kernel_choices
from graphopt._torch.facts.change_detection import transforms_undone as transforms_undone
from graphopt._torch.facts.change_detection import without_dispatch_modes as without_dispatch_modes
from graphopt._torch.facts.graph_nodes import add_node as add_node
from graphopt._torch.facts.memory_profile import allocator_events as allocator_events
from graphopt._torch.facts.memory_profile import peaks_between_marks as peaks_between_marks
from graphopt._torch.facts.memory_profile import profile_memory as profile_memory
from graphopt._torch.facts.memory_profile import profiler_is_running as profiler_is_running
from graphopt._torch.facts.op_calls import CallRecorder as CallRecorder
from graphopt._torch.facts.op_calls import OpOverloadPacket as OpOverloadPacket
from graphopt._torch.facts.op_calls import autocast_operators as autocast_operators
from graphopt._torch.facts.op_calls import call_plainly as call_plainly
from graphopt._torch.facts.op_calls import has_autocast_rule as has_autocast_rule
from graphopt._torch.facts.op_calls import higher_order_ops as higher_order_ops
from graphopt._torch.facts.op_calls import is_composite as is_composite
from graphopt._torch.facts.op_calls import is_registered as is_registered
from graphopt._torch.facts.op_calls import parts_of as parts_of
from graphopt._torch.facts.op_calls import qualified_name as qualified_name
from graphopt._torch.facts.op_calls import refusals_expected as refusals_expected
from graphopt._torch.facts.op_calls import resolve_overload as resolve_overload
from graphopt._torch.fully_sharded import ShardedGroup as ShardedGroup
from graphopt._torch.fully_sharded import ShardedModule as ShardedModule
from graphopt._torch.fully_sharded import ShardedParameter as ShardedParameter
from graphopt._torch.fully_sharded import root_hooks as root_hooks
from graphopt._torch.fully_sharded import sharded_modules as sharded_modules
from graphopt._torch.fully_sharded import share_state as share_state
from graphopt._torch.kernels.eager_kernels import cpu_computes_in as cpu_computes_in
from graphopt._torch.kernels.eager_kernels import eager_kernels as eager_kernels
from graphopt._torch.kernels.eager_kernels import without_onednn as without_onednn
from graphopt._torch.kernels.eager_layouts import eager_layouts as eager_layouts
from graphopt._torch.kernels.eager_layouts import in_kernels_layout as in_kernels_layout

__all__ = [
    "AUTOCAST_BEGINS",
    "AUTOCAST_ENDS",
    "MOST_GRAPHS",
    "NEEDS_VALUES",
    "SETS_GRAD_MODE",
    "AotInput",
    "AotOutput",
    "BoxedCodeGen",
    "CallRecorder",
    "CompiledCall",
    "DictionariesUnchanged",
    "ExchangeMetError",
    "FakeTensor",
    "FakeTensorMode",
    "GradientRoutes",
    "GuardOnDataDependentSymNode",
    "HigherOrderOperator",
    "InductorCode",
    "JointSplit",
    "JointTrace",
    "LazyGraphModule",
    "OpOverload",
    "OpOverloadPacket",
    "PlacementsOfGradient",
    "RealWrites",
    "ShardedGroup",
    "ShardedModule",
    "ShardedParameter",
    "StandIn",
    "SymbolRange",
    "TensorsUnchanged",
    "TrialWrites",
    "abort_group",
    "add_node",
    "all_gather_into_tensor",
    "all_gather_into_tensor_out",
    "all_reduce",
    "all_reduce_",
    "all_to_all_op",
    "all_to_all_single",
    "allocator_events",
    "apply_function",
    "as_in_eager",
    "as_partitioner",
    "as_seen_by_a_trace",
    "as_traced",
    "autocast_operators",
    "before_compiled_backward",
    "broadcast",
    "broadcast_",
    "broken_guard",
    "call_plainly",
    "callers_modes",
    "collectives_draw_apart",
    "compile_with_inductor",
    "compiled_call",
    "compiled_with",
    "connect_second_derivatives",
    "cpu_computes_in",
    "custom_function",
    "cut",
    "cut_as_in_eager",
    "default_device",
    "default_store",
    "device_kind",
    "dict_version",
    "distributed_from",
    "eager_kernels",
    "eager_layouts",
    "evaluate_number",
    "example_tensor",
    "example_twins",
    "explain_second_derivatives",
    "fake_mode",
    "fixed_size_guard",
    "function_that_is_cut",
    "generated_function",
    "global_module_hooks",
    "gradient_like",
    "group_on_host",
    "guard_by",
    "guard_hooks",
    "guard_texts",
    "has_autocast_rule",
    "has_global_backward_hooks",
    "has_global_step_hooks",
    "has_no_data",
    "higher_order_ops",
    "hooks_added",
    "hooks_of_users_modules",
    "in_forward_mode",
    "in_function_transform",
    "in_kernels_layout",
    "inner_gradients",
    "input_paths",
    "input_sources",
    "intercept_checkpoint",
    "intercept_custom_functions",
    "intercept_inner_gradients",
    "is_batched",
    "is_composite",
    "is_distributed",
    "is_free_to_go",
    "is_fusible",
    "is_gloo",
    "is_of_sizes",
    "is_plain_tensor",
    "is_registered",
    "is_tcp_store",
    "is_written",
    "kernel_choices",
    "known_value",
    "local_from",
    "local_part",
    "local_result",
    "map_aggregate",
    "mark_optimizer_called",
    "mode_of",
    "number_hint",
    "number_places",
    "open_symbols",
    "outside_of_tracing",
    "parametrizations_are_cached",
    "parametrized_apart",
    "parts_of",
    "peaks_between_marks",
    "placements_of_gradient",
    "process_groups",
    "profile_memory",
    "profiler_is_running",
    "pytree",
    "qualified_name",
    "ranks_without_network",
    "reduce_scatter_tensor",
    "refusals_expected",
    "region_of",
    "resolve_overload",
    "root_hooks",
    "run_and_save_rng_state",
    "run_with_rng_state",
    "set_aside_in_bodies",
    "sharded_modules",
    "share_state",
    "size_hint",
    "size_range",
    "size_symbols",
    "sizes_taken_as",
    "stand_in_mode",
    "stand_in_of",
    "stands_for_real",
    "start_receiving",
    "start_sending",
    "storage_key",
    "symbolic_float",
    "symbolic_size",
    "taken_sizes",
    "tell_of_limits",
    "trace_update",
    "traced_as_one",
    "traced_node",
    "tracing_graph",
    "transforms_undone",
    "unwrapped_step",
    "wait_tensor",
    "wait_with",
    "whole_function",
    "with_paths",
    "without_dispatch_modes",
    "without_onednn",
    "without_regions",
    "work_of",
]
