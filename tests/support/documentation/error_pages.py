"""A page for each error: when it is raised, what to do, and the message that its docstring's example really gets."""

from __future__ import annotations

import inspect
import tempfile
from html import escape
from pathlib import Path

from graphopt import errors, planning
from tests.support.docstring_examples import message_of_example
from tests.support.documentation.pages import Entry, Page, plain_text
from tests.support.documentation.pass_pages import docstring_html
from tests.support.ranks import run_ranks

__all__ = ["ERRORS", "LOST_RANK", "error_page", "message_of"]

ERRORS: list[type[Exception]] = [
    found
    for module in (errors, planning)
    for name in module.__all__
    if isinstance(found := getattr(module, name), type) and issubclass(found, Exception)
]
"""Every error that graphopt raises on purpose."""

LOST_RANK = """
import graphopt
from graphopt.passes import DataParallel

torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = graphopt.optimize_step(model, optimizer, [DataParallel()], loss=lambda model, x: model(x).sum())
try:
    for number in range(3):
        if rank == 1 and number == 2:
            os._exit(9)
        step(torch.randn(8, 4))
except graphopt.RankError as error:
    say(str(error))
"""
"""A program of two ranks, one of which ends in the middle of training."""


def message_of(error: type[Exception]) -> tuple[str, str]:
    """A program that ends in the error, and its message with its notes."""
    if error is not errors.RankError:
        return message_of_example(error)
    with tempfile.TemporaryDirectory() as folder:
        (message,) = run_ranks(LOST_RANK, 2, Path(folder, "store"), codes=[0, 9])[0]
    return LOST_RANK.strip(), message


def error_page(error: type[Exception], message: tuple[str, str]) -> Page:
    """The page of an error.

    Args:
        error: its class.
        message: what ``message_of`` gives.
    """
    bases = ", ".join(f"<code>{base.__name__}</code>" for base in error.__bases__)
    source, text = message
    where = "graphopt.planning" if error.__module__.startswith("graphopt.planning") else "graphopt"
    where = where if error.__name__ != "GraphBreakError" else "graphopt.errors"
    body = "\n".join(
        [
            f"<h1>{error.__name__}</h1>",
            f"<p><code>{where}.{error.__name__}</code>, a kind of {bases}.</p>",
            docstring_html(inspect.getdoc(error) or ""),
            '<h2 id="message">A program that ends in it, and its message</h2>',
            f"<pre><code>{escape(source)}</code></pre>",
            f'<div class="output"><pre>{escape(text)}</pre></div>',
        ]
    )
    path = f"errors/{error.__name__}.html"
    return Page(error.__name__, "Errors", path, body, [Entry(error.__name__, "error", path, plain_text(body))])
