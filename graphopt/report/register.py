"""What the layers below show and compute by name: formats, pictures, notebook displays, progress, the overview.

``graphopt`` calls ``register`` when it is imported, so that ``program.to_svg()``, ``program.memory()`` and the like
find their functions, and long work shows itself on a terminal and in a notebook.
"""

from __future__ import annotations

from typing import Any

from graphopt.analysis.dominators import checkpoint_candidates
from graphopt.analysis.liveness import simulate
from graphopt.analysis.program_replay import reserved_memory
from graphopt.ir.files.deserialization import from_json
from graphopt.ir.files.serialization import to_json
from graphopt.ir.files.text import to_text
from graphopt.ir.lowering import to_graph_module
from graphopt.ir.memory.timeline import MemoryTimeline
from graphopt.ir.program import Program
from graphopt.ir.provided.formats import Format, register_format
from graphopt.ir.provided.methods import provide
from graphopt.report.console.escape import safe
from graphopt.report.console.log_lines import log_capture
from graphopt.report.console.overview import announce
from graphopt.report.formats.dot import to_dot
from graphopt.report.formats.model_explorer import to_model_explorer
from graphopt.report.formats.perfetto import to_perfetto
from graphopt.report.formats.python import to_python
from graphopt.report.formats.ranks_page import to_ranks
from graphopt.report.notebook import program_html, records_html, rewritten_html, show_page, timeline_html
from graphopt.report.notebook_progress import NotebookProgress
from graphopt.report.page import page_of_program, page_of_snapshots
from graphopt.report.pictures.memory_timeline import timeline_svg
from graphopt.report.pictures.picture import to_svg
from graphopt.report.text.diff import diff
from graphopt.rewriting.pass_ import Records
from graphopt.rewriting.progress import show_progress
from graphopt.runtime.calls.observers import observe_captures
from graphopt.runtime.drop_in.module import Optimized
from graphopt.runtime.step.train_step import TrainStep

__all__ = ["FORMATS", "register"]

FORMATS = (
    Format("text", ".txt", to_text, "for people: types, phases, modules, provenance, ends of life", "#"),
    Format("python", ".py", to_python, "Python source that runs", "#"),
    Format("dot", ".dot", to_dot, "the graph in Graphviz' language", "//"),
    Format("svg", ".svg", to_svg, "the picture: forward down the left, backward up the right"),
    Format("json", ".json", to_json, "everything, to load again with Program.from_json"),
    Format("html", ".html", page_of_program, "the interactive page"),
    Format("perfetto", ".perfetto.json", to_perfetto, "one run as predicted, for ui.perfetto.dev"),
    Format("ranks", ".ranks.html", to_ranks, "what each rank holds, and when it waits, as a page"),
    Format("model-explorer", ".model-explorer.json", to_model_explorer, "the graph for Model Explorer"),
)
"""The formats that graphopt brings along."""


def register() -> None:
    """Make everything known; to be called once more does no harm."""
    for form in FORMATS:
        register_format(form)
    provide(Program, "memory", simulate)
    provide(Program, "reserved", reserved_memory)
    provide(Program, "checkpoint_candidates", checkpoint_candidates)
    provide(Program, "to_graph_module", to_graph_module)
    provide(Program, "from_json", from_json)
    provide(Program, "diff", diff)
    provide(Program, "show", _show_program)
    provide(Program, "notebook", program_html)
    provide(MemoryTimeline, "to_svg", timeline_svg)
    provide(MemoryTimeline, "notebook", timeline_html)
    provide(Records, "notebook", records_html)
    provide(Optimized, "notebook", _optimized_html)
    provide(TrainStep, "notebook", _step_html)
    provide(TrainStep, "show", _show_step)
    show_progress(NotebookProgress())
    observe_captures(announce)
    observe_captures(log_capture)


def _show_program(program: Program) -> Any:
    return show_page(program.to_html(), program.title)


def _show_step(step: TrainStep) -> Any:
    page = page_of_snapshots(step.snapshots, step.records, pipeline=str(step.pipeline))
    return show_page(page, step.program.title)


def _step_html(step: TrainStep) -> str:
    if not step.captured:
        return f"<div>{safe(step)}: nothing is captured yet</div>"
    return rewritten_html(repr(step), step.program, step.records)


def _optimized_html(model: Optimized) -> str:
    drop_in = model._graphopt
    title = f"{drop_in.original.__name__}, optimized with {str(drop_in.options.pipeline) or 'no passes'}"
    latest = drop_in.runner.captures.latest
    if latest is None:
        return f"<div>{safe(title)}; nothing is captured yet</div><pre>{safe(model)}</pre>"
    return rewritten_html(title, latest.rewritten.program, latest.rewritten.records)
