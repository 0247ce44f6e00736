"""The options of ``torch.compile(model, backend="graphopt", options={...})``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from graphopt.errors import ArgumentError, PipelineError, choice, did_you_mean, wrong_argument
from graphopt.rewriting.pipeline import Pipeline
from graphopt.rewriting.registry import find_pass
from graphopt.runtime.compile.backend import check_backend
from graphopt.runtime.programs.rewrite import Verify
from graphopt.runtime.runner import Options

__all__ = ["options_of"]

_KNOWN = ("passes", "budget", "verify", "codegen")


def options_of(given: Mapping[str, Any] | None, mode: str | None) -> Options:
    """What graphs are rewritten with.

    Raises:
        ArgumentError: for an option that there is not, with the near ones, and for a mode.
        GraphoptError: for code that nothing generates.
        PipelineError: where passes do not fit together, or act on more than graphs with their gradients.
    """
    if mode is not None:
        raise ArgumentError(
            f"mode={mode!r} is for torch's own compiler; backend='graphopt' takes options={{'passes': ...}} or "
            "options={'budget': ...}, and 'codegen': 'inductor' has its code compiled by that"
        )
    if given is not None and not isinstance(given, Mapping):
        raise wrong_argument("options", given, "a dict", "options={'budget': '60%'}")
    options = dict(given or {})
    for name in options:
        if name not in _KNOWN:
            hint = did_you_mean(name, _KNOWN)
            raise ArgumentError(
                f"backend='graphopt' has no option {name!r}; {f'{hint} ' if hint else ''}it has {', '.join(_KNOWN)}"
            )
    verify = options.get("verify", "structure")
    if verify not in (True, False):
        verify = choice("verify", verify, ("structure", "numerics"), {"off": "", "none": ""}) or False
    codegen = options.get("codegen", "eager")
    check_backend(codegen)
    return Options(_pipeline(options), None, codegen, cast(Verify, verify))


def _pipeline(options: Mapping[str, Any]) -> Pipeline:
    passes = list(Pipeline(options.get("passes")).passes)
    if options.get("budget") is not None:
        passes += Pipeline([find_pass("fit-memory")(options["budget"])]).passes  # type: ignore[call-arg]
    pipeline = Pipeline(passes)
    late = [current.name for current in pipeline.passes if current.stage == "step"]
    between = [current.name for current in pipeline.training if current.name not in late]
    for names, what in ((late, "the optimizer's update"), (between, "what happens between steps")):
        if names:
            raise PipelineError(
                f"{', '.join(names)} needs {what}, which torch.compile does not see: use graphopt.optimize_step"
            )
    return pipeline
