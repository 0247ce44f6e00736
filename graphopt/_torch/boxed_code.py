"""Code generation for graphs that take their arguments in a list, which is emptied.

Extends ``torch.fx.graph.CodeGen``, whose methods may change with any release of torch. ``LazyGraphModule`` is torch's:
a module whose code is generated when it is first needed, and not by each copy and each change on the way there.
"""

from __future__ import annotations

from typing import Any

from torch.fx._lazy_graph_module import _LazyGraphModule as LazyGraphModule
from torch.fx.graph import CodeGen

__all__ = ["BoxedCodeGen", "LazyGraphModule"]


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
