"""A pipeline in a file, loaded and saved."""

from __future__ import annotations

import os
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.rewriting.pipeline import Passes, Pipeline
from graphopt.rewriting.pipeline_file import passes_as_text, read_passes

__all__ = ["load", "save"]


def load(path: str | os.PathLike[str], *, allow_write: str | os.PathLike[str] | None = None) -> Pipeline:
    """The pipeline in a TOML, JSON or YAML file, with the names that the text form has.

    The end of the file's name says which of the three it is. Its only entry is ``passes``: an object with an entry for
    each pass, whose options are an object again; or a list of such objects and of passes as text::

        [passes.recompute]
        checkpoints = ["blocks.*"]

        [passes.fit-memory]
        budget = "8GB"

    YAML needs PyYAML. Files may come from strangers: values are checked and none is evaluated, and sizes are limited.
    What an option has passes write, such as ``folder`` of ``offload-state``, goes below ``allow_write`` or the folder
    of ``GRAPHOPT_DUMP``, or is refused, links and ``..`` followed. An option may name a file to read, such as
    ``cost="machine.toml"``, wherever it is: it is read as data, the figures of a device, and none of it is run.

    Args:
        path: of a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file. As a ``pathlib.Path`` it is also taken wherever
            ``passes`` are.
        allow_write: a folder in which and below which the passes of the file may write.

    Raises:
        PipelineError: listing everything that is wrong with the passes, each with its path in the file, and its line
            where that is clear; for a pass that is to write elsewhere.
        GraphoptError: for a file that cannot be read, or is not of the form that its name says.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> path = graphopt.configs.save("recompute{checkpoints=blocks.*}", folder / "pipeline.toml")
        >>> print(path.read_text().strip())
        [passes.recompute]
        checkpoints = ["blocks.*"]
        >>> str(graphopt.configs.load(path))
        'recompute{checkpoints=blocks.*}'
    """
    return Pipeline(read_passes(path, allow_write=allow_write))


def save(passes: Passes, path: str | os.PathLike[str]) -> Path:
    """Write a pipeline to a file that ``load`` reads; options at their defaults are left out.

    Args:
        passes: as for ``graphopt.Pipeline``. The pipeline may be the passes of a ``Translation``.
        path: of a ``.toml``, ``.json``, ``.yaml`` or ``.yml`` file, which is replaced.

    Returns:
        the path.

    Raises:
        GraphoptError: for another kind of file, one that cannot be written, and a pass that ``load`` would not find by
            its name.

    Example:
        >>> import pathlib, tempfile
        >>> folder = pathlib.Path(tempfile.mkdtemp())
        >>> graphopt.configs.save([Offload(tier="disk")], folder / "pipeline.json").read_text().split()
        ['{', '"passes":', '{', '"offload":', '{', '"tier":', '"disk"', '}', '}', '}']
    """
    path = Path(path)
    text = passes_as_text(Pipeline(passes).passes, path.suffix)
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise GraphoptError(f"the file {str(path)!r} cannot be written: {error.strerror}") from None
    return path
