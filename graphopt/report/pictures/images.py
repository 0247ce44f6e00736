"""Pictures as pixels: SVG through a converter that is installed."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.report.console.terminal import write

__all__ = ["png_of_svg", "write_bytes"]

_SCALE = 2
"""Pixels of the PNG for each of the SVG's, so that it is sharp in print."""

_CONVERTERS = {
    "rsvg-convert": ("--zoom", str(_SCALE), "--format", "png", "--output", "{png}", "{svg}"),
    "inkscape": ("--export-type=png", f"--export-dpi={96 * _SCALE}", "--export-filename={png}", "{svg}"),
}
"""Programs that turn SVG into PNG, and their arguments, in the order in which they are looked for."""


def png_of_svg(svg: str) -> bytes:
    """A picture as PNG, by the first of ``rsvg-convert`` and ``inkscape`` that is installed.

    Raises:
        GraphoptError: where there is none, and where it fails.
    """
    for name, arguments in _CONVERTERS.items():
        found = shutil.which(name)
        if found is not None:
            return _convert(found, arguments, svg)
    raise GraphoptError(
        f"a png needs one of {', '.join(_CONVERTERS)} (Debian's librsvg2-bin has the first), and none is installed: "
        "install one, or write the picture as svg"
    )


def _convert(program: str, arguments: tuple[str, ...], svg: str) -> bytes:
    with tempfile.TemporaryDirectory() as folder:
        source, result = Path(folder) / "picture.svg", Path(folder) / "picture.png"
        source.write_text(svg, encoding="utf-8")
        command = [program, *(argument.format(svg=source, png=result) for argument in arguments)]
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", check=False)
        if done.returncode or not result.is_file():
            said = (done.stderr.strip() or done.stdout.strip() or "it said nothing").splitlines()[-1]
            raise GraphoptError(f"{program} made no png (exit code {done.returncode}): {said}")
        return result.read_bytes()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file and say so on stderr.

    Raises:
        GraphoptError: where it cannot be written.
    """
    try:
        path.write_bytes(data)
    except OSError as error:
        raise GraphoptError(f"cannot write {path}: {error.strerror or error}") from error
    write(f"wrote {path} ({len(data)} bytes)", sys.stderr)
