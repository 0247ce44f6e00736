"""The exceptions of graphopt, the one way they name near alternatives, and checks of what users hand over."""

from __future__ import annotations

import difflib
import functools
import importlib.util
import inspect
import math
import os
import types
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import ParamSpec, TypeVar

__all__ = [
    "ArgumentError",
    "CaptureError",
    "GraphBreakError",
    "GraphoptError",
    "PassError",
    "PipelineError",
    "RankError",
    "TorchVersionError",
    "VerifyError",
    "as_cause",
    "check_type",
    "choice",
    "did_you_mean",
    "is_own",
    "near_words",
    "no_such_word",
    "public",
    "quoted",
    "short_traceback",
    "shown",
    "whole_number",
    "wrong_argument",
]


class GraphoptError(Exception):
    """Base of every error that graphopt raises on purpose; catch it to catch them all.

    It is raised itself where a value or a name is wrong. What to do: the message names the value and what it may be.

    Example:
        >>> graphopt.capture(model, (x,)).to("postscript")
        Traceback (most recent call last):
            ...
        graphopt.errors.GraphoptError: ...
    """


class ArgumentError(GraphoptError, TypeError, ValueError):
    """An argument is not what a function takes; the message names it, what it got, and what it takes.

    It is a ``TypeError`` and a ``ValueError`` as well, as Python's own are. What to do: give what the message says;
    near names are in it where a name was wrong.

    Example:
        >>> graphopt.passes.Recompute(3)
        Traceback (most recent call last):
            ...
        graphopt.errors.ArgumentError: ...
    """


class CaptureError(GraphoptError):
    """A model, loss or optimizer cannot be turned into one program; the message says where and what to do.

    Raised by ``capture``, and at the first call of what ``optimize`` and ``optimize_step`` make. What to do: change the
    line that the message names, or keep that piece out of the model. Where the same call fails in eager mode too, its
    own error is raised in place of this one.

    Attributes:
        of_trace: whether torch or the model's own code raised while it was traced, so that eager mode may fail as well.

    Example:
        >>> graphopt.capture(nn.ReLU(), (x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.CaptureError: ...
    """

    of_trace = False


class GraphBreakError(CaptureError):
    """A model is not one graph: its Python looks at the values of tensors, or does something between tensors.

    Raised by ``capture`` and by a whole step. What to do: compute with tensors in place of ``if`` and ``.item()``, or
    use ``graphopt.optimize``, which captures such a model in parts.

    Attributes:
        in_parts: False where a drop-in model runs in eager mode as a whole, since its parts would not do as it does.
        of_values: whether a way through the model, or a size, depends on values.

    Example:
        >>> class Branching(nn.Module):
        ...     def forward(self, x):
        ...         return x + 1 if x.sum() > 0 else x - 1
        >>> graphopt.capture(Branching(), (x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.GraphBreakError: ...
    """

    in_parts = True
    of_values = False


class PipelineError(GraphoptError):
    """The list of passes is wrong; all problems are reported at once.

    Raised before anything is captured. What to do: correct each line of the message; it names the passes at fault.

    Example:
        >>> graphopt.Pipeline("recompute-evenly{number=2},recompute-evenly{number=3}")
        Traceback (most recent call last):
            ...
        graphopt.errors.PipelineError: ...
    """


class PassError(GraphoptError):
    """A pass failed; the original exception is the cause (``__cause__``), and a note shows the place in the pipeline.

    What to do: change the pass's options as the message says. For a pass of your own, set ``GRAPHOPT_DUMP`` to a
    folder: it then holds the program and a script that runs the pass on it again.

    Example:
        >>> @dataclass(frozen=True)
        ... class Broken(graphopt.Pass):
        ...     name, stage, numerics = "broken", "joint", "bitwise"
        ...     def apply(self, program):
        ...         return graphopt.Changed({"halves": 1 // 0})
        >>> graphopt.optimize(model, [Broken()], example_inputs=(x,))
        Traceback (most recent call last):
            ...
        graphopt.errors.PassError: ...
    """


class VerifyError(GraphoptError):
    """A program breaks an invariant; the message names the rule and the pass that broke it.

    Raised behind each pass. What to do: where the pass is yours, insert calls with ``Program.insert`` alone, which
    keeps the rules; otherwise leave the pass out, and report it with the run directory that ``GRAPHOPT_DUMP`` names.

    Example:
        >>> from graphopt.ir.verify import verify
        >>> program = graphopt.capture(model, (x,), loss=loss)
        >>> for node in program.phase_nodes(graphopt.Phase.BACKWARD):
        ...     del node.meta["val"]
        >>> verify(program)
        Traceback (most recent call last):
            ...
        graphopt.errors.VerifyError: ...
    """


class TorchVersionError(GraphoptError, ImportError):
    """The installed torch lacks something that graphopt needs; the message says what, what for, and what to install.

    It is an ``ImportError`` as well: most of what graphopt needs is looked for when the first of its names is used.

    Example:
        >>> from graphopt._torch.private_names import Feature, require
        >>> require(Feature("printing in colours", {"torch._C": "_colours"}))
        Traceback (most recent call last):
            ...
        graphopt.errors.TorchVersionError: ...
    """


class RankError(GraphoptError, RuntimeError):
    """An exchange failed because of other ranks; the message says which, and where each was last seen.

    The original error is its cause. It is a ``RuntimeError`` as well, as those of torch.distributed are.

    Args:
        message: for people.
        ranks: the ranks at fault, numbered as in the default process group; none where no rank could be named.

    Example:
        >>> error = graphopt.RankError("rank 1 gives no sign of life any more", ranks=(1,))
        >>> error.ranks
        (1,)
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks


def as_cause(error: Exception) -> Exception | None:
    """An error whose message another one repeats, to be its cause: shown where everything is to be shown."""
    return error if _everything_is_shown() else None


def _everything_is_shown() -> bool:
    return os.environ.get("GRAPHOPT_TRACEBACK", "").strip().lower() == "full"


_TORCH = importlib.util.find_spec("torch")
_FOLDERS = [Path(__file__).parent, *map(Path, (_TORCH and _TORCH.submodule_search_locations) or ())]
_NOT_USERS = tuple(f"{place}{os.sep}" for folder in _FOLDERS for place in {folder, folder.resolve()})
"""Where files of graphopt and of torch are."""

_OWN = tuple(f"{place}{os.sep}" for place in {_FOLDERS[0], _FOLDERS[0].resolve()})
"""Where those of graphopt are."""


def short_traceback(error: GraphoptError) -> GraphoptError:
    """An error as it leaves graphopt: without the frames below, and its causes without those that are graphopt's.

    What a cause only says again is not shown twice: such a cause goes away, or keeps its type and attributes alone.
    That of a ``RankError`` stays as it is. Errors that other code has raised, the user's above all, are not touched.

    The environment variable ``GRAPHOPT_TRACEBACK=full`` keeps everything, for those who work on graphopt or on a pass.
    """
    if _everything_is_shown() or not is_own(error):
        return error
    error.__traceback__ = None
    cause = error.__cause__
    if cause is not None and _repeats(cause, error):
        if is_own(cause) and not isinstance(error, type(cause)):
            cause.args = ("what the error below says",)
            own, told = getattr(cause, "__notes__", []), getattr(error, "__notes__", [])
            cause.__notes__ = [note for note in own if note not in told]
        else:
            error.__cause__, error.__suppress_context__ = None, True
    seen = _shown_before(error)
    for _ in range(_LONGEST_CHAIN):
        if seen is None:
            break
        while is_own(seen) and len(_files(seen)) > 1 and _is_covered(_files(seen)[0]):
            assert seen.__traceback__ is not None
            seen.__traceback__ = seen.__traceback__.tb_next
        seen = _shown_before(seen)
    return error


def is_own(error: BaseException) -> bool:
    """Whether an error is graphopt's and was raised by graphopt: what users raise stays as it is."""
    if not isinstance(error, GraphoptError) or not type(error).__module__.startswith("graphopt."):
        return False
    files = _files(error)
    return not files or files[-1].startswith(_OWN)


def _files(error: BaseException) -> list[str]:
    """The files of the frames between here and the line that raised an error."""
    files, frame = list[str](), error.__traceback__
    while frame is not None:
        files.append(frame.tb_frame.f_code.co_filename)
        frame = frame.tb_next
    return files


def _shown_before(error: BaseException) -> BaseException | None:
    """The error that Python prints above another one."""
    return error.__cause__ or (None if error.__suppress_context__ else error.__context__)


def _repeats(cause: BaseException, error: BaseException) -> bool:
    """Whether a cause says nothing that its error does not say: no other words, and no line of the user's.

    The failure that a ``RankError`` was raised for stays its cause: its class is what a launcher may decide by.
    """
    return not isinstance(error, RankError) and str(cause) in str(error) and all(map(_is_covered, _files(cause)))


def _is_covered(file: str) -> bool:
    return file.startswith(_NOT_USERS)


_LONGEST_CHAIN = 20
"""Causes of causes that are looked at."""


def quoted(error: BaseException, most: int | None = None) -> str:
    """An error in the message of another one: its type and its text, or the text alone where it is graphopt's own.

    Args:
        error: whose text may be a word that says nothing by itself, as a ``KeyError``'s is.
        most: letters of the text that are shown.
    """
    text = str(error).strip()[:most]
    if isinstance(error, GraphoptError) and text:
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def near_words(word: str, known: Iterable[str], limit: int = 5) -> list[str]:
    """The words closest to ``word``, whatever their case and whether ``-``, ``_`` or nothing is between their parts."""
    choices = {choice: _plain(choice) for choice in known}
    plain = _plain(word)
    same = [choice for choice, letters in choices.items() if letters == plain]
    if same:
        return same[:limit]
    found = difflib.get_close_matches(plain, list(choices.values()), n=limit, cutoff=0.51)
    near = [choice for letters in dict.fromkeys(found) for choice, own in choices.items() if own == letters]
    if not near and plain:
        near = [choice for choice, letters in choices.items() if plain in letters]
    return near[:limit]


def _plain(word: str) -> str:
    return word.lower().replace("-", "").replace("_", "")


def did_you_mean(name: object, known: Iterable[str], limit: int = 5) -> str:
    """A sentence with the names closest to ``name``, or an empty string where none is close."""
    near = near_words(name, known, limit) if isinstance(name, str) else []
    return f"did you mean {', '.join(repr(choice) for choice in near)}?" if near else ""


# --- arguments -------------------------------------------------------------------------------------------------------

_LONGEST = 60
"""Letters of a value that are shown."""


def shown(value: object) -> str:
    """A value in an error: itself where it is short, and what it is."""
    if value is None or isinstance(value, bool):
        return str(value)
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (types.FunctionType, types.BuiltinFunctionType, types.MethodType)):
        return f"the function {value.__name__}"
    kind = type(value).__name__
    if isinstance(value, (tuple, list, set, frozenset, dict)) and len(value) > 1:
        return f"a {kind} of {len(value)} ({', '.join(dict.fromkeys(type(item).__name__ for item in value))})"
    text = repr(value)
    short = len(text) <= _LONGEST and "\n" not in text and " at 0x" not in text
    article = "an" if kind[0] in "AEIOUaeiou" else "a"
    return f"{text} ({kind})" if short else f"{article} {kind}"


def wrong_argument(argument: str, value: object, wanted: str, hint: str = "") -> ArgumentError:
    """The error for an argument that is something else than what is wanted.

    Args:
        argument: its name, with its owner where that is not clear.
        value: what it got.
        wanted: what it takes, as the end of a sentence: ``a number of bytes``.
        hint: what to write instead.
    """
    return ArgumentError(f"{argument} is {wanted}, got {shown(value)}{hint and f'; {hint}'}")


def check_type(argument: str, value: object, kinds: type | tuple[type, ...], wanted: str, hint: str = "") -> None:
    """Refuse a value that is of none of the types; True and False count as numbers nowhere.

    Raises:
        ArgumentError: as ``wrong_argument`` says.
    """
    wanted_kinds = kinds if isinstance(kinds, tuple) else (kinds,)
    if (isinstance(value, bool) and bool not in wanted_kinds) or not isinstance(value, kinds):
        raise wrong_argument(argument, value, wanted, hint)


def no_such_word(argument: str, word: object, known: Collection[object]) -> ArgumentError:
    """The error for a word that an argument does not know, with the near ones or all that it knows."""
    words = [str(other) for other in known]
    listed = f"it is {', '.join(map(repr, known))}"
    near = did_you_mean(word, words) if isinstance(word, str) else ""
    return ArgumentError(f"{argument}={word!r:.80} is not known; {f'{near} ({listed})' if near else listed}")


def choice(argument: str, value: object, known: Sequence[str], aliases: Mapping[str, str] | None = None) -> str:
    """One of the words that an argument knows, also where it is written in other case or under another name.

    Args:
        argument: its name.
        value: what it got.
        known: the words.
        aliases: other names in lower case, with the words that they stand for.

    Raises:
        ArgumentError: for any other value, with the near words.
    """
    if isinstance(value, str):
        lower = value.strip().lower()
        found = {word.lower(): word for word in known} | dict(aliases or {})
        if lower in found:
            return found[lower]
    raise no_such_word(argument, value, known)


def whole_number(argument: str, value: object, *, least: int = 0, of: str = "") -> int:
    """A whole number, also where it is written as ``8e9``.

    Args:
        argument: its name.
        value: what it got.
        least: the smallest that is allowed.
        of: what is counted.

    Raises:
        ArgumentError: for a fraction, for what is no number, and for a number that is too small.
    """
    if isinstance(value, float) and math.isfinite(value) and value.is_integer():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise wrong_argument(argument, value, f"a whole number{of and f' of {of}'} of at least {least}")
    return value


P = ParamSpec("P")
R = TypeVar("R")


def public(function: Callable[P, R]) -> Callable[P, R]:
    """A function that users call: unknown keywords are refused with the near ones, and tracebacks are short.

    Raises:
        ArgumentError: when the function is called with another keyword.
    """
    parameters = inspect.signature(function).parameters
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    known = [name for name in parameters if name != "self"]

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        if not takes_any and not kwargs.keys() <= parameters.keys():
            raise _unknown_keyword(function.__name__, kwargs, known)
        try:
            return function(*args, **kwargs)
        except GraphoptError as error:
            if not is_own(error):
                raise
            raise short_traceback(error) from error.__cause__

    return call


def _unknown_keyword(owner: str, given: Iterable[str], known: Sequence[str]) -> ArgumentError:
    name = next(name for name in given if name not in known)
    near = did_you_mean(name, known) or did_you_mean(_KEYWORDS.get(name, ""), known)
    listed = f"it takes {', '.join(known)}"
    return ArgumentError(f"{owner} has no argument {name!r}; {f'{near} ({listed})' if near else listed}")


_KEYWORDS = {
    "criterion": "loss",
    "loss_fn": "loss",
    "opt": "optimizer",
    "optim": "optimizer",
    "inputs": "example_inputs",
    "batch": "example_inputs",
    "dynamic": "dynamic_shapes",
    "pipeline": "passes",
    "check": "verify",
}
"""What other libraries call these arguments."""
