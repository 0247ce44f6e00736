"""The text form of passes: every option type both ways, and errors with their places."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, final

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError, Pass, Pipeline, PipelineError
from graphopt.passes import PartitionCheckpoints, Recompute
from graphopt.rewriting.text.spec import format_pass, option_fields, parse_passes
from tests.support.properties import examples
from tests.support.training import Plain


@final
@dataclass(frozen=True)
class Options(Plain):
    """Every type that an option may have."""

    name: ClassVar[str] = "options"

    count: int = 3
    ratio: float = 0.5
    on: bool = False
    text: str = "plain"
    limit: int | None = None
    size: int | float | str = 8
    mode: Literal["fast", "small"] = "fast"
    names: tuple[str, ...] = ()
    shares: tuple[float, ...] = (0.5,)
    flags: tuple[bool, ...] | None = None
    mixed_values: tuple[int | str | None, ...] = (1,)


@final
@dataclass(frozen=True)
class Needs(Plain):
    name: ClassVar[str] = "needs"
    budget: str
    factor: float


KNOWN: dict[str, type[Pass]] = {"plain": Plain, "options": Options, "needs": Needs, "recompute": Recompute}


def find(name: str) -> type[Pass]:
    if name not in KNOWN:
        raise PipelineError(f"there is no pass called {name!r}")
    return KNOWN[name]


@pytest.mark.parametrize(
    ("given_pass", "text"),
    [
        (Options(), "options"),
        (Options(count=-2, ratio=1e-5), "options{count=-2 ratio=1e-05}"),
        (Options(on=True, limit=7), "options{on=true limit=7}"),
        (Options(text="a b,c{}"), 'options{text="a b,c{}"}'),
        (Options(text='say "no\\'), 'options{text="say \\"no\\\\"}'),
        (Options(text="true"), 'options{text="true"}'),
        (Options(text="12"), 'options{text="12"}'),
        (Options(size="8GB"), "options{size=8GB}"),
        (Options(size="8"), 'options{size="8"}'),
        (Options(size=2.5), "options{size=2.5}"),
        (Options(mode="small"), "options{mode=small}"),
        (Options(names=("blocks.*", "layers.*::mm")), "options{names=blocks.*,layers.*::mm}"),
        (Options(flags=(True, False)), "options{flags=true,false}"),
        (Options(mixed_values=(1, "1", None, "none")), 'options{mixed-values=1,"1",none,"none"}'),
        (Needs(budget="8GB", factor=2.0), "needs{budget=8GB factor=2.0}"),
        (Recompute(["a", "b"]), "recompute{checkpoints=a,b}"),
    ],
    ids=str,
)
def test_text_goes_both_ways(given_pass: Pass, text: str) -> None:
    assert parse_passes(text, find) == [given_pass]
    assert parse_passes(format_pass(given_pass), find) == [given_pass]
    assert format_pass(given_pass) == text


@pytest.mark.parametrize("empty", [Options(shares=()), Options(flags=()), Options(text=""), Recompute(())], ids=repr)
def test_nothing_in_an_option_goes_both_ways(empty: Pass) -> None:
    assert parse_passes(format_pass(empty), find) == [empty]


words = st.text(max_size=8)
options = st.builds(
    Options,
    count=st.integers(),
    ratio=st.floats(allow_nan=False),
    on=st.booleans(),
    text=words,
    limit=st.none() | st.integers(),
    size=st.integers() | st.floats(allow_nan=False) | words,
    mode=st.sampled_from(["fast", "small"]),
    names=st.lists(words, max_size=3).map(tuple),
    shares=st.lists(st.floats(allow_nan=False), max_size=3).map(tuple),
    flags=st.none() | st.lists(st.booleans(), max_size=3).map(tuple),
    mixed_values=st.lists(st.none() | st.integers() | words, max_size=3).map(tuple),
)


@given(st.lists(options, min_size=1, max_size=2))
@examples(30)
def test_any_options_survive_the_text_form(passes: list[Options]) -> None:
    assert parse_passes(",".join(map(str, passes)), find) == passes


def test_text_is_free_with_spaces_and_underscores() -> None:
    assert parse_passes(" options { mixed_values=2  on=true } ,\n plain ", find) == [
        Options(mixed_values=(2,), on=True),
        Plain(),
    ]


@pytest.mark.parametrize(
    ("text", "place", "message"),
    [
        ("options{cuont=1}", "$.passes[0] (options)", "no option 'cuont'; did you mean 'count'"),
        ("plain,options{count=many}", "$.passes[1] (options).count", "'many' is not a whole number"),
        ("options{count=1.5}", "$.passes[0] (options).count", "'1.5' is not a whole number"),
        ("options{on=1}", "$.passes[0] (options).on", "'1' is not true or false"),
        ("options{mode=big}", "$.passes[0] (options).mode", "'big' is not one of fast, small"),
        ("options{count=1,2}", "$.passes[0] (options).count", "takes one value, got 2"),
        ("options{count=1 count=2}", "$.passes[0] (options).count", "given twice"),
        ("needs{factor=1}", "$.passes[0] (needs)", "needs the option budget"),
        ("plain{x=1}", "$.passes[0] (plain)", "no option 'x'; it has the options none"),
    ],
)
def test_a_wrong_option_is_an_error_with_its_place(text: str, place: str, message: str) -> None:
    with pytest.raises(PipelineError) as caught:
        parse_passes(text, find)
    assert place in str(caught.value)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("text", "message", "column"),
    [
        ("plain,", "expected another pass", 6),
        ("plain options", "expected a comma", 6),
        ("plain,{x=1}", "expected the name of a pass", 6),
        ("options{count}", "expected option=value", 8),
        ("options{count=1", "expected }", 15),
        ('options{text="open}', "this quote is not closed", 13),
        ("options{count=}", "expected a value", 14),
    ],
)
def test_a_syntax_error_points_at_the_place(text: str, message: str, column: int) -> None:
    with pytest.raises(PipelineError, match=message) as caught:
        parse_passes(text, find)
    lines = str(caught.value).splitlines()
    assert lines[1].strip() == text
    assert lines[2].index("^") == column + 2


def test_all_problems_are_listed_at_once() -> None:
    with pytest.raises(PipelineError) as caught:
        parse_passes("nothing,options{cuont=1 on=maybe},needs", find)
    for part in ("'nothing'", "'cuont'", "'maybe'", "needs the option budget", "needs the option factor"):
        assert part in str(caught.value)


def test_options_are_described_by_the_fields() -> None:
    fields = {option.name: option for option in option_fields(Options)}
    assert fields["mixed-values"].field == "mixed_values"
    assert fields["ratio"].default == 0.5
    assert [option.required for option in option_fields(Needs)] == [True, True]


# --- texts from strangers --------------------------------------------------------------------------------------------

TEXTS = [
    "recompute{checkpoints=blocks.*},offload{tier=disk prefetch=1}",
    "fit-memory{budget=8GB host-budget=16GB time-limit=3}",
    "mixed-precision{dtype=float16 deny=softmax,a init-scale=3}", 'partition-checkpoints{group="()()tp"}',
    "clip-gradients{max-norm=inf}",
    "data-parallel{groups=a,b bucket-mb=0},deep-gradient-compression{sparsity=0.9 bandwidth=1Gbit}",
    "recompute-evenly{number=3}",
]  # fmt: skip
PIECES = [
    "{", "}", "=", ",", '"', "'", "\\", "()", "(", " ", "\n", "\x00", "none", "true", "nan", "inf", "-1", "0",
    "1e999", "9" * 400,
    "recompute", "budget", "%", "GB", "é", "\ud800", "*", ".", "٣", "x" * 300,
]  # fmt: skip


@st.composite
def mutated(draw: st.DrawFn) -> str:
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(text)))
        end = draw(st.integers(start, min(len(text), start + 6)))
        text = text[:start] + draw(st.sampled_from(PIECES) | st.text(max_size=4)) + text[end:]
    return text


@given(mutated())
@examples(200)
def test_a_mutated_text_is_passes_that_come_back_or_an_error(text: str) -> None:
    try:
        pipeline = Pipeline(text)
    except GraphoptError:  # anything else fails the test
        return
    assert Pipeline(str(pipeline)).passes == pipeline.passes


@given(st.text(max_size=12) | st.sampled_from(["()", "()()tp", "()x", "none", "True", "1e5", "", "a b", 'a"b', "a\\"]))
@examples(200)
def test_any_text_of_an_option_comes_back(text: str) -> None:
    given_ = PartitionCheckpoints(group=text)
    assert Pipeline(str(given_)).passes == (given_,)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("fit-memory{budget=8GB host-budget=" + "9" * 400 + "}", "is more than any memory has"),
        ("fit-memory{budget=" + "9" * 400 + "}", "is more than any memory has"),
        ("fit-memory{budget=8GB time-limit=nan}", "time_limit is a number of seconds of at least 0, got nan"),
        ("fit-memory{budget=8GB time-limit=inf}", "time_limit is a number of seconds of at least 0, got inf"),
    ],
)
def test_numbers_without_a_meaning_are_refused(text: str, message: str) -> None:
    with pytest.raises(GraphoptError, match=message):
        Pipeline(text)
