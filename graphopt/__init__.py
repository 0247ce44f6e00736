"""graphopt: a PyTorch training step, captured as one program you can read, and rewritten with passes."""

from __future__ import annotations

from graphopt.adapter import FxPass
from graphopt.analysis.measure import MeasuredPeak, measure_peak
from graphopt.capture import capture
from graphopt.errors import CaptureError, GraphoptError, PassError, PipelineError, RankError, VerifyError
from graphopt.names import name
from graphopt.pipeline import Changed, Pass, Pipeline
from graphopt.program import Phase, Policy, Program
from graphopt.runtime.module import optimize
from graphopt.runtime.resume import redistribute
from graphopt.runtime.scaler import scaler
from graphopt.runtime.step import TrainStep, optimize_step

__version__ = "0.1.0"

__all__ = [
    "CaptureError",
    "Changed",
    "FxPass",
    "GraphoptError",
    "MeasuredPeak",
    "Pass",
    "PassError",
    "Phase",
    "Pipeline",
    "PipelineError",
    "Policy",
    "Program",
    "RankError",
    "TrainStep",
    "VerifyError",
    "__version__",
    "capture",
    "measure_peak",
    "name",
    "optimize",
    "optimize_step",
    "redistribute",
    "scaler",
]
