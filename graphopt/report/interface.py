"""What ``graphopt`` has for its users, as type checkers see it; ``graphopt`` imports each name when it is asked for."""

from __future__ import annotations

from graphopt.analysis.measured_peak import MeasuredPeak as MeasuredPeak
from graphopt.analysis.measured_peak import measure_peak as measure_peak
from graphopt.capture import capture as capture
from graphopt.capture import without_data as without_data
from graphopt.errors import ArgumentError as ArgumentError
from graphopt.errors import CaptureError as CaptureError
from graphopt.errors import GraphoptError as GraphoptError
from graphopt.errors import PassError as PassError
from graphopt.errors import PipelineError as PipelineError
from graphopt.errors import RankError as RankError
from graphopt.errors import TorchVersionError as TorchVersionError
from graphopt.errors import VerifyError as VerifyError
from graphopt.ir import ops as ops
from graphopt.ir.names import name as name
from graphopt.ir.node import Phase as Phase
from graphopt.ir.node import Policy as Policy
from graphopt.ir.program import Program as Program
from graphopt.ir.provided.formats import Format as Format
from graphopt.ir.provided.formats import available_formats as available_formats
from graphopt.ir.provided.formats import register_format as register_format
from graphopt.ir.version import VERSION
from graphopt.rewriting import config_translation
from graphopt.rewriting.distributed.sharding import sharded_state as sharded_state
from graphopt.rewriting.pass_ import Changed as Changed
from graphopt.rewriting.pass_ import Pass as Pass
from graphopt.rewriting.patterns.fx_pass import FxPass as FxPass
from graphopt.rewriting.patterns.rewrite_pass import Rewrite as Rewrite
from graphopt.rewriting.pipeline import Pipeline as Pipeline
from graphopt.rewriting.precision.devices import fast_dtype as fast_dtype
from graphopt.rewriting.training_pass import TrainingPass as TrainingPass
from graphopt.runtime.advice.choose_passes import advise as advise
from graphopt.runtime.checkpoints import checkpoint as checkpoint
from graphopt.runtime.compile.inductor_partitioner import partitioner as partitioner
from graphopt.runtime.drop_in.largest_batch import largest_batch as largest_batch
from graphopt.runtime.drop_in.module import optimize as optimize
from graphopt.runtime.graph_breaks.dynamo_backend import CompiledGraph as CompiledGraph
from graphopt.runtime.graph_breaks.dynamo_backend import compiled_graphs as compiled_graphs
from graphopt.runtime.state.materialize_shards import materialize_shards as materialize_shards
from graphopt.runtime.state.random_streams import RandomStreams as RandomStreams
from graphopt.runtime.state.state_dict import redistribute as redistribute
from graphopt.runtime.step.load_step import load_step as load_step
from graphopt.runtime.step.optimize_step import optimize_step as optimize_step
from graphopt.runtime.step.scaler import scaler as scaler
from graphopt.runtime.step.train_step import TrainStep as TrainStep

__version__ = VERSION
configs = config_translation
