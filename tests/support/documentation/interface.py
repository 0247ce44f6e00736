"""The modules that users import as pages made by pdoc, and what a search finds of them."""

from __future__ import annotations

import types
import warnings
from collections.abc import Iterator
from pathlib import Path

import pdoc.doc
import pdoc.render

import graphopt
from graphopt import checkpoint, configs, ops, planning, sharded_state
from graphopt.ir.memory import timeline
from graphopt.rewriting import pass_
from tests.support.documentation.pages import Entry, Page, plain_text

__all__ = ["TEMPLATES", "interface_pages", "public_names", "render_module"]

TEMPLATES = Path(__file__).with_name("templates")

_MODULES = {
    "graphopt": graphopt,
    "graphopt.planning": planning,
    "graphopt.configs": configs,
    "graphopt.checkpoint": checkpoint,
    "graphopt.sharded_state": sharded_state,
    "graphopt.ops": ops,
    "graphopt.ir.memory.timeline": timeline,
    "graphopt.rewriting.pass_": pass_,
}
"""What is documented, by the name that users import it under."""


def _documented(name: str, module: types.ModuleType) -> pdoc.doc.Module:
    """A module under the name that users know it by."""
    if module.__name__ == name:
        for public in module.__all__:  # imported when asked for; pdoc takes them as they lie there
            getattr(module, public)
        return pdoc.doc.Module(module)
    known_as = types.ModuleType(name, module.__doc__)
    known_as.__dict__.update({key: getattr(module, key) for key in module.__all__}, __all__=module.__all__)
    return pdoc.doc.Module(known_as)


def interface_pages() -> tuple[list[Page], dict[str, pdoc.doc.Module]]:
    """A page without a body for each module, and pdoc's modules, which ``render_module`` makes bodies of."""
    pdoc.render.configure(docformat="google", template_directory=TEMPLATES, search=False)
    modules = {name: _documented(name, module) for name, module in _MODULES.items()}
    pages = []
    for name, module in modules.items():
        path = f"{name.replace('.', '/')}.html"
        pages.append(Page(name, "Interface", path, "", list(_entries(module, path))))
    return pages, modules


def render_module(module: pdoc.doc.Module, modules: dict[str, pdoc.doc.Module]) -> str:
    """The whole page of a module."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # annotations that only type checkers import
        return pdoc.render.html_module(module, modules)


def _entries(module: pdoc.doc.Module, path: str) -> Iterator[Entry]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield Entry(module.modulename, "module", path, plain_text(module.docstring))
        for member in module.members.values():
            methods = member.own_members if isinstance(member, pdoc.doc.Class) else []
            for found in (member, *methods):
                if found.kind != "module" and not found.name.startswith("_"):
                    text = plain_text(found.docstring.replace("<", "&lt;"))
                    yield Entry(f"{module.modulename}.{found.qualname}", found.kind, f"{path}#{found.qualname}", text)


def public_names() -> dict[str, str]:
    """Where each public name is documented: ``Program`` and ``graphopt.Program``."""
    found: dict[str, str] = {}
    for module_name, module in reversed(_MODULES.items()):
        for name in getattr(module, "__all__", ()):
            address = f"{module_name.replace('.', '/')}.html#{name}"
            if isinstance(getattr(module, name), types.ModuleType):
                address = f"graphopt/{name}.html"
            found[name] = found[f"{module_name}.{name}"] = address
    return found
