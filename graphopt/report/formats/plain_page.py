"""A page without scripts: one HTML file in ASCII that needs no network, under a policy that lets nothing in."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator, Sequence

from graphopt.report.console.escape import safe

__all__ = ["plain_page", "plain_table"]

_STYLE = """
:root{color-scheme:light dark;--ink:#1b1f24;--paper:#fff;--dim:#57606a;--line:#d5dae0}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--paper:#0d1117;--dim:#9aa4af;--line:#30363d}}
body{margin:0 auto;max-width:1100px;padding:1rem;color:var(--ink);background:var(--paper);
font:15px/1.5 ui-sans-serif,system-ui,"Segoe UI",Helvetica,Arial,sans-serif}
h1{font-size:1.4rem}h2{font-size:1.1rem;margin-top:2rem}
.wide{overflow-x:auto}table{border-collapse:collapse}
th,td{padding:.2rem .7rem;border-bottom:1px solid var(--line);text-align:right;white-space:nowrap}
th:first-child,td:first-child{text-align:left}td.text,th.text{text-align:left}
.dim{color:var(--dim)}svg{width:100%;height:auto}
@media print{.wide{overflow:visible}}
"""


def plain_table(head: Sequence[str], rows: Sequence[Sequence[str]], text: int = 0, name: str = "") -> Iterator[str]:
    """The markup of a table that scrolls by itself where it is wider than the page.

    Args:
        head: the heads of its columns.
        rows: the texts of its cells.
        text: beside the first one, a column that is no number.
        name: rows have it and their number as their ``id``, where links lead to them.
    """

    def cells(tag: str, row: Sequence[str]) -> str:
        scope = ' scope="col"' if tag == "th" else ""
        kinds = (' class="text"' if text and index == text else "" for index in range(len(row)))
        return "".join(f"<{tag}{scope}{kind}>{safe(cell)}</{tag}>" for cell, kind in zip(row, kinds, strict=True))

    yield '<div class="wide" tabindex="0"><table>'
    yield f"<thead><tr>{cells('th', head)}</tr></thead><tbody>"
    for number, row in enumerate(rows):
        mark = f' id="{name}{number}"' if name else ""
        yield f"<tr{mark}>{cells('td', row)}</tr>"
    yield "</tbody></table></div>"


def plain_page(title: str, body: Sequence[str], style: str = "") -> str:
    """The page.

    Args:
        title: of the window.
        body: its markup, line by line, with users' texts made safe already.
        style: what is added to the style that all such pages have.
    """
    styles = _STYLE + style
    digest = base64.b64encode(hashlib.sha256(styles.encode("utf-8")).digest()).decode("ascii")
    policy = f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"
    head = (
        f'<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{safe(policy)}"><title>{safe(title)} · graphopt</title>'
        f"<style>{styles}</style>"
    )
    page = "\n".join(
        ("<!doctype html>", f'<html lang="en"><head>{head}</head><body><main>', *body, "</main></body></html>")
    )
    return page.encode("ascii", "xmlcharrefreplace").decode("ascii") + "\n"
