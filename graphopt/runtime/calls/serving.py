"""Which program serves a call: one that there is, or one that is captured or planned for it."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import nn

from graphopt.capture import CaptureSession
from graphopt.capture.call.flatten import Structure, flatten, flatten_call
from graphopt.capture.call.garbage_collection import no_collection
from graphopt.capture.call.varying_axes import VaryingAxes
from graphopt.capture.effects.tensor_effects import NumbersRead, attributes_set
from graphopt.capture.forward.transformers_masks import Question, answer
from graphopt.capture.guards.fingerprint import ModelFingerprint
from graphopt.capture.guards.variable_guards import VariablesRead
from graphopt.errors import GraphoptError, RankError, quoted
from graphopt.ir.program import Program
from graphopt.rewriting.memory.fit.budget import budget_error
from graphopt.rewriting.pass_ import Pass
from graphopt.runtime.calls.captures import Captures, signature
from graphopt.runtime.calls.changing_sizes import ChangingSizes
from graphopt.runtime.calls.changing_values import ChangingValues
from graphopt.runtime.calls.size_rules import SizePlans, SizeRules, Target, size_rules, targets
from graphopt.runtime.calls.varying_sizes import Answers, Key, Served, VaryingSizes, open_axes
from graphopt.runtime.programs.rewrite import Rewritten

__all__ = ["Capture", "Maker", "Serving"]

logger = logging.getLogger(__name__)


@dataclass
class Capture:
    """One capture: what passes made of it, and which sizes it serves."""

    rewritten: Rewritten
    rules: SizeRules

    def programs(self) -> list[Program]:
        """Everything of it that runs."""
        return [self.rewritten.program]


C = TypeVar("C", bound=Capture)
C_co = TypeVar("C_co", bound=Capture, covariant=True)


class Maker(Protocol[C_co]):
    """Captures a call.

    Attributes:
        runs: the function that is captured, where it may change from call to call while the model stays as it is.
    """

    @property
    def runs(self) -> Callable[..., Any] | None:
        """See above."""
        ...

    def session(self, dynamic_shapes: Any) -> CaptureSession:
        """What traces the call's model, with these sizes that vary."""
        ...

    def compile(self, session: CaptureSession, target: Target | None) -> C_co:
        """What runs, made of a session by passes; ``target`` for one that is planned once more."""
        ...


@dataclass
class _Call:
    """A call, taken apart."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    runs: Callable[..., Any] | None
    tensors: list[torch.Tensor]
    structure: Structure

    def signature(self, model_key: Hashable, *, sizes: bool) -> Hashable:
        return signature((model_key, self.runs), self.structure, self.tensors, sizes=sizes)

    def answers(self, questions: Mapping[Hashable, Sequence[Question]]) -> tuple[bool, ...]:
        """What the tensors answer to what the model asks of them."""
        asked = questions.get(self.structure.key)
        return answer(asked, self.tensors) if asked else ()


@dataclass
class Serving(Generic[C]):
    """The captures of one model or step, and what is found out about sizes that change.

    Attributes:
        dynamic_shapes: as the user gave them.
        passes: that rewrite programs.
        captures: by signature.
        names: of the positional arguments of a call, as far as they have names.
        examples_stay: whether the tensors of captured calls are kept, for what compares values later.
    """

    dynamic_shapes: Any
    passes: Sequence[Pass]
    examples_stay: bool = False
    captures: Captures[C] = field(default_factory=lambda: Captures())
    names: Sequence[str] = ()
    _fingerprint: ModelFingerprint = field(default_factory=ModelFingerprint)
    _variables: VariablesRead = field(default_factory=VariablesRead)
    _varying: VaryingSizes[C] = field(default_factory=lambda: VaryingSizes())
    _plans: dict[int, SizePlans[C]] = field(default_factory=dict)
    _changing: ChangingSizes = field(default_factory=ChangingSizes)
    _values: ChangingValues = field(default_factory=ChangingValues)
    _questions: dict[Hashable, tuple[Question, ...]] = field(default_factory=dict)
    _numbers: list[NumbersRead] = field(default_factory=list)
    _kinds: dict[CaptureSession, Key] = field(default_factory=dict)
    """Of calls that are captured with sizes open at the moment, which calls have one kind."""

    @property
    def automatic(self) -> bool:
        """Whether sizes that change become symbols by themselves."""
        return isinstance(self.dynamic_shapes, str)

    @property
    def limited(self) -> list[Pass]:
        """The passes that keep programs within a number of bytes."""
        return [current for current in self.passes if current.has_limit]

    @property
    def declared(self) -> Any:
        """The sizes that the user says vary."""
        return None if self.automatic else self.dynamic_shapes

    def find(
        self, model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], maker: Maker[C]
    ) -> tuple[C, list[torch.Tensor]]:
        """What serves a call, made where there is nothing yet, and the tensors of the call."""
        call = _Call(model, args, kwargs, maker.runs, *flatten_call(args, kwargs))
        key = self._key_of(call)
        served = self._known(key, call)
        if served is None:
            with no_collection():
                served = self._capture(key, call, maker)
                if not self.examples_stay:
                    served.capture.rewritten.session.release()
        found = served.capture
        if served.values and self.limited:
            found = self._planned(key, served, call, maker)
        self.captures.latest = found
        return found, call.tensors

    @property
    def changes(self) -> int:
        """How often the model was found changed (``ModelFingerprint.changes``)."""
        return self._fingerprint.changes

    def everything(self) -> list[C]:
        """Every capture, and every further plan of one."""
        plans = [planned for plans in self._plans.values() for planned in plans.programs]
        return list({id(capture): capture for capture in (*self.captures.all(), *plans)}.values())

    # --- what there is -----------------------------------------------------------------------------------------------

    def _known(self, key: Key, call: _Call) -> Served[C] | None:
        """What serves a call."""
        if self.declared is not None:
            sizes = key, tuple(tensor.shape for tensor in call.tensors)
            known = self._varying.remembered(sizes)
            found = None if known is not None else self.captures.find(key, call.tensors)
            return known if found is None else self._varying.remember(sizes, _served(found, call.tensors))
        found = self.captures.find(key, call.tensors)
        if found is not None:
            return Served(found, {})
        if not self.automatic:
            return None
        return self._varying.remembered(key) or self._varying.find(key, self._key_of(call, sizes=False), call.tensors)

    def _key_of(self, call: _Call, *, sizes: bool = True) -> Key:
        model = self._fingerprint(call.model)
        variables = self._variables(call.model, call.runs, self._fingerprint.changes)
        known = call.signature((model, variables), sizes=sizes and self.declared is None)
        return known, self._answers(call)

    def _answers(self, call: _Call) -> Answers:
        """What the tensors of a call answer, and the numbers that captures read of others."""
        answers = call.answers(self._questions)
        return (*answers, *(read.now() for read in self._numbers)) if self._numbers else answers

    def _answered(self, key: Key, call: _Call, session: CaptureSession) -> Key:
        """The key of a call that has been captured: the model may have asked something new of its tensors."""
        known = self._questions.get(call.structure.key, ())
        self._questions[call.structure.key] = tuple(dict.fromkeys((*known, *session.questions)))
        for read in session.numbers:
            if all(known.tensor is not read.tensor for known in self._numbers):
                self._numbers.append(read)
        self._variables.captured(call.model, call.runs, self._fingerprint.changes)
        return key[0], self._answers(call)

    # --- captures ----------------------------------------------------------------------------------------------------

    def _capture(self, key: Key, call: _Call, maker: Maker[C]) -> Served[C]:
        """Capture a call, with the sizes open that have changed since those before it."""
        if not self.automatic:
            return self._capture_fixed(key, call, maker)
        kind = self._key_of(call, sizes=False)
        axes = self._varying.axes(kind, call.tensors)
        fixing = ", ".join(current.name for current in self.passes if current.fixed_sizes)
        if axes and fixing:
            reason = f"{fixing} acts on tensors of fixed sizes only"
            self._tell(call.model, self._varying.refuse(kind, axes, call.tensors, reason, self._names(call)))
        served = self._capture_varying(key, kind, call, maker, axes) if axes and not fixing else None
        if not isinstance(served, Served):
            why, served = served, self._capture_fixed(key, call, maker)
            if why is not None:  # told now: where a call fails in eager mode too, that is all there is to tell
                told = self._varying.refuse(kind, axes, call.tensors, why, self._names(call))
                self._tell(call.model, told)
            base = _as_captured(served.capture.rewritten)
            if base is not None:
                self._varying.add_fixed((kind[0], self._answers(call)), call.tensors, base)
        return served

    def _capture_fixed(self, key: Key, call: _Call, maker: Maker[C]) -> Served[C]:
        """Capture a call with the sizes that it has, or with those open that the user has declared."""
        model = call.model
        parts, first = list(map(id, model.modules())), not self.captures.all()
        started = time.perf_counter()
        session = maker.session(self.declared)
        compiled = maker.compile(session, None)
        key = self._answered(key, call, session)
        if self.automatic and compiled.rules:  # one that was read, and serves calls of other sizes too
            return self._keep_varying(key, self._key_of(call, sizes=False), call, compiled)
        found = self.captures.add(key, compiled)
        seconds = time.perf_counter() - started
        if self.dynamic_shapes is None:
            self._tell(model, self._changing.note(self.names, call.args, call.kwargs, seconds))
        self._tell(model, self._note_values(call, seconds))
        after = self._key_of(call)
        # Where forward has set something while it was captured, or made modules, the next call is another one,
        # behind the first capture; behind others what is set there (a list) is not what makes a difference.
        if after != key and not first and parts == list(map(id, model.modules())):
            self.captures.add(after, found)
        return _served(found, call.tensors)

    def _capture_varying(
        self, key: Key, kind: Key, call: _Call, maker: Maker[C], axes: VaryingAxes
    ) -> Served[C] | str | None:
        """Capture a call with sizes open; why that cannot be, or None where it is better not done in this call."""
        started = time.perf_counter()
        session = maker.session(axes)
        self._kinds[session] = kind
        try:
            capture = maker.compile(session, None)
        except RankError:
            raise
        except Exception as error:
            if budget_error(error):
                return None  # with fixed sizes there is more that a plan can do
            logger.debug("not captured with sizes open", exc_info=True)
            return _reason(error)
        finally:
            del self._kinds[session]
        served = self._keep_varying(self._answered(key, call, session), kind, call, capture, axes)
        seconds = time.perf_counter() - started
        self._tell(call.model, self._note_values(call, seconds))
        return served

    def _keep_varying(self, key: Key, kind: Key, call: _Call, capture: C, axes: VaryingAxes | None = None) -> Served[C]:
        """Let a capture whose sizes vary serve calls of its kind.

        Args:
            key: of the call.
            kind: of the call.
            call: that it was made, or read, for.
            capture: as it is.
            axes: that were to vary, for one that may have been made.
        """
        told = ""
        if axes is None or capture.rewritten.loaded:
            served = self._varying.add_read(key, kind, call.tensors, capture)
        else:
            served, told = self._varying.add(key, kind, call.tensors, capture, axes, self._names(call))
        self._varying.share(kind, (kind[0], key[1]))
        self._varying.share(kind, self._key_of(call, sizes=False))
        self.captures.add((kind, "sizes vary"), capture)
        self._tell(call.model, told)
        return served

    def _names(self, call: _Call) -> list[str]:
        """What the tensors of a call are called: ``x``, ``batch['mask']``."""
        _, structure = flatten((call.args, call.kwargs))
        return [_name(path, self.names) for path in structure.paths]

    def _note_values(self, call: _Call, seconds: float) -> str:
        """What to tell of values of Python that change from one capture to the next."""
        variables = self._variables.values | {
            f"the number that is read at {read.where}": read.now() for read in self._numbers
        }
        set_on = {name: value for tensor in call.tensors for name, value in attributes_set(tensor).items()}
        variables |= {f"the attribute {name} of an argument": value for name, value in set_on.items()}
        return self._values.note(self.names, call.args, call.kwargs, variables, call.model, seconds)

    def _tell(self, model: nn.Module, text: str) -> None:
        if text:
            logger.warning("%s: %s", type(model).__name__, text)

    def check(self, session: CaptureSession, program: Program) -> None:
        """Compare a program that has just been captured with sizes open with the one for the first sizes of its kind.

        Raises:
            OtherProgramError: where it is another one.
        """
        kind = self._kinds.get(session)
        if kind is not None and program.stage == "joint":
            self._varying.check(kind, program, self.rules(session))

    def rules(self, session: CaptureSession) -> SizeRules:
        """Which sizes a capture serves."""
        return size_rules(session.captured.program, declared=self.declared is not None)

    # --- plans -------------------------------------------------------------------------------------------------------

    def targets(self, session: CaptureSession, target: Target | None) -> list[Target | None]:
        """What a capture is to be planned for, the better one first; nothing in particular where sizes are fixed.

        Args:
            session: that has been captured.
            target: for one that is planned once more.
        """
        rules = self.rules(session)
        if not rules or not self.limited:
            return [None]
        if target is None:
            values = rules.match(session.captured.example_tensors) or {}
            largest = self._varying.largest(self._kinds.get(session), rules)
            target = Target(values, {name: max(value, largest.get(name, 0)) for name, value in values.items()})
        return [*targets(rules, target.sizes, target)]

    def _planned(self, key: Key, served: Served[C], call: _Call, maker: Maker[C]) -> C:
        """What serves a call within the bytes that there are, planned for its sizes where need be."""
        capture, values = served.capture, served.values
        plans = self._plans.get(id(capture))
        if plans is None:
            largest = capture.rewritten.program.context.sizes.largest
            plans = self._plans.setdefault(id(capture), SizePlans(capture, self.limited, largest))
        plans.note(values)
        found = plans.find(values)
        if found is not None:
            return found
        try:
            planned = maker.compile(_session_of(plans, capture, call, maker), plans.target(values))
            same = planned.rules.symbols == capture.rules.symbols  # a new capture of one that was read names them alike
            if planned.rules and same and planned.rules.match(call.tensors) is not None:
                return plans.add(values, planned)
            sizes = [f"{rule.place} = {call.tensors[rule.input].shape[rule.dim]}" for rule in capture.rules.axes]
            reason = "a pass has fixed a size that varies, so that no other one is planned for: captured by itself is"
            self._tell(call.model, f"{reason} {', '.join(sizes)}")
        except GraphoptError as error:
            found = plans.find(values, near=False)
            if found is not None and budget_error(error):
                return found
            if not self.automatic or not budget_error(error):
                raise
        return self._capture_fixed(key, call, maker).capture  # where there is more that a plan can do, or it raises


def _served(capture: C, tensors: list[torch.Tensor]) -> Served[C]:
    return Served(capture, (capture.rules.match(tensors) if capture.rules else None) or {})


def _session_of(plans: SizePlans[C], capture: C, call: _Call, maker: Maker[C]) -> CaptureSession:
    """What a capture is planned once more from: its session, or one like it where the capture was read and not made."""
    session = capture.rewritten.session
    if session.sizes_vary:
        return session
    if plans.session is None:
        plans.session = maker.session(open_axes(capture.rules, len(call.tensors)))
    return plans.session


def _as_captured(rewritten: Rewritten) -> Program | None:
    """The joint program, as it was before passes of that stage; None for a capture that was read and not made."""
    if rewritten.loaded:
        return None
    return next(program for label, program in rewritten.snapshots if label == "captured joint")


def _reason(error: Exception) -> str:
    return quoted(error).splitlines()[0].rstrip(".:")


def _name(path: str, names: Sequence[str]) -> str:
    """What a tensor is called whose place is ``[0][number]…`` or ``[1]['keyword']…``."""
    found = re.fullmatch(r"\[(?P<keyword>[01])\]\['?(?P<key>[^\]']*)'?\](?P<rest>.*)", path)
    if found is None:
        return path
    if found["keyword"] == "1":
        return found["key"] + found["rest"]
    place = int(found["key"])
    return (names[place] if place < len(names) else f"args[{place}]") + found["rest"]
