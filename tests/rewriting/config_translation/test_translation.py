"""No field is dropped: whatever is given becomes a pass or an option, or is named."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from graphopt import GraphoptError, Pipeline, configs
from graphopt.ir.files.checked_json import Field
from graphopt.rewriting.config_translation import deepspeed_fields, paddle_fields
from graphopt.rewriting.config_translation.translation import Findings, Known, Section, Translation
from tests.support.properties import examples

Sections = Mapping[str, Mapping[str, Known]]

DEEPSPEED: Sections = {
    "activation_checkpointing": deepspeed_fields.ACTIVATIONS,
    "fp16": deepspeed_fields.FP16,
    "bf16": deepspeed_fields.BF16,
    "bfloat16": deepspeed_fields.BF16,
    "amp": deepspeed_fields.AMP,
    "torch_autocast": deepspeed_fields.AUTOCAST,
    "data_types": deepspeed_fields.DATA_TYPES,
    "zero_optimization": deepspeed_fields.ZERO,
    "zero_optimization.offload_optimizer": deepspeed_fields.OFFLOAD,
    "zero_optimization.offload_param": deepspeed_fields.OFFLOAD,
}
PADDLE: Sections = {
    "recompute_configs": paddle_fields.RECOMPUTE,
    "amp_configs": paddle_fields.AMP,
    "dgc_configs": paddle_fields.DGC,
    "localsgd_configs": paddle_fields.LOCAL_SGD,
    "adaptive_localsgd_configs": paddle_fields.ADAPTIVE,
    "gradient_merge_configs": paddle_fields.MERGE,
    "sharding_configs": paddle_fields.SHARDING,
    "gradient_scale_configs": paddle_fields.GRADIENT_SCALE,
    "hybrid_configs": paddle_fields.HYBRID,
}
CANDIDATES: tuple[Any, ...] = (
    True, False, 0, 1, 2, 3, 8, 0.5, 2.0, 64.0, 1e6, "O1", "O2", "fp16", "bf16", "fp32", "cpu", "none", "float16",
    "avg", "sum", "softmax", ["a"], [0.5, 0.75], [4], [], {}, {"enabled": False},
    {"type": "SGD", "params": {"lr": 0.1}},
)  # fmt: skip
"""Values of which each field takes some."""


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Warnings are looked at elsewhere; here there are thousands."""
    logger = logging.getLogger("graphopt")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(before)


def takes(known: Known, path: str) -> list[Any]:
    """The values that a field takes."""
    found = []
    for value in CANDIDATES:
        try:
            known.read(Field(value, path))
        except GraphoptError:
            continue
        found.append(value)
    return found


def documents(fields: Mapping[str, Known], sections: Sections, path: str = "") -> st.SearchStrategy[dict[str, Any]]:
    """Subsets of the fields, with values that they take; sections with fields of their own."""
    entries: dict[str, st.SearchStrategy[Any]] = {}
    for name, known in fields.items():
        below = f"{path}{name}"
        if below in sections:
            entries[name] = documents(sections[below], sections, f"{below}.")
        else:
            entries[name] = st.sampled_from(takes(known, below))
    few = st.lists(st.sampled_from(sorted(entries)), max_size=8, unique=True)
    return few.flatmap(lambda names: st.fixed_dictionaries({name: entries[name] for name in names}))


def leaves(document: Mapping[str, Any], sections: Sections, path: str = "") -> list[tuple[str, ...]]:
    """The fields that a document gives, by path."""
    found: list[tuple[str, ...]] = []
    for name, value in document.items():
        below = f"{path}{name}"
        if below in sections and value:
            found += [(name, *rest) for rest in leaves(value, sections, f"{below}.")]
        else:
            found.append((name,))
    return found


def without(document: Mapping[str, Any], path: tuple[str, ...], put: Any = None) -> dict[str, Any]:
    """The document without a field, or with another value in its place."""
    name, *rest = path
    if rest:
        return {**document, name: without(document[name], tuple(rest), put)}
    kept = {key: value for key, value in document.items() if key != name}
    return kept if put is None else {**kept, name: put}


def said_of(path: tuple[str, ...], found: Translation) -> bool:
    """Whether a note names the field, or a section that it is in."""
    names = {".".join(path[: end + 1]) for end in range(len(path))}
    return any(note.split(" ")[0].rstrip(":") in names for note in found.notes)


def outcome(translate: Callable[[Any], Translation], document: Any) -> str:
    """What comes of a document: passes, accumulation, or the error."""
    try:
        found = translate(document)
    except GraphoptError as error:
        return str(error)
    return f"{Pipeline(found)} {found.accumulate}"


def assert_nothing_dropped(
    translate: Callable[[Any], Translation], document: dict[str, Any], fields: Mapping[str, Known], sections: Sections
) -> None:
    try:
        found = translate(document)
    except GraphoptError:
        return  # said what is wrong
    before = outcome(translate, document)
    for path in leaves(document, sections):
        if said_of(path, found):
            continue
        section = ".".join(path[:-1])
        known = (sections[section] if section else fields)[path[-1]]
        others = [outcome(translate, without(document, path, put)) for put in takes(known, ".".join(path))]
        others.append(outcome(translate, without(document, path)))
        assert any(other != before for other in others), f"{path} is dropped: {document} gives {before}"


@given(documents(deepspeed_fields.CONFIG, DEEPSPEED))
@examples(100)
def test_no_field_of_deepspeed_is_dropped(document: dict[str, Any]) -> None:
    assert_nothing_dropped(configs.from_deepspeed, document, deepspeed_fields.CONFIG, DEEPSPEED)


@given(documents(paddle_fields.STRATEGY, PADDLE))
@examples(100)
def test_no_field_of_paddle_is_dropped(document: dict[str, Any]) -> None:
    assert_nothing_dropped(configs.from_paddle, document, paddle_fields.STRATEGY, PADDLE)


@pytest.mark.sweep(but=("from_paddle-fields1-sections1",))
@pytest.mark.parametrize(
    ("translate", "fields", "sections"),
    [
        (configs.from_deepspeed, deepspeed_fields.CONFIG, DEEPSPEED),
        (configs.from_paddle, paddle_fields.STRATEGY, PADDLE),
    ],
)
def test_each_field_alone(
    translate: Callable[[Any], Translation], fields: Mapping[str, Known], sections: Sections
) -> None:
    """With every value that it takes."""
    for name, known in fields.items():
        for value in takes(known, name):
            if name not in sections:
                assert_nothing_dropped(translate, {name: value}, fields, sections)
    for section, inner in sections.items():
        for name, known in inner.items():
            for value in takes(known, name):
                document: dict[str, Any] = {name: value, **({"enabled": True} if "enabled" in inner else {})}
                for part in reversed(section.split(".")):
                    document = {part: document}
                if section.endswith("_configs") and section.removesuffix("_configs") in fields:
                    document[section.removesuffix("_configs")] = True
                assert_nothing_dropped(translate, document, fields, sections)


def test_a_translation_is_a_list_of_passes() -> None:
    found = Translation(configs.from_deepspeed({"gradient_clipping": 1.0}), accumulate=2, notes=["a is b"])
    assert (str(Pipeline(found)), found.accumulate, found.notes) == ("clip-gradients{max-norm=1.0}", 2, ("a is b",))
    assert found == list(found)


def test_a_section_names_what_nobody_used() -> None:
    findings = Findings()
    section = Section(
        Field({"used": 1, "default": 2, "other": 3, "none": None, "off": False}, "$.part"),
        {name: Known(lambda found: found.value, 2) for name in ("used", "default", "other")}
        | {"none": Known(lambda found: found.value), "off": Known(lambda found: found.value, False)},
        findings,
    )
    assert section.use("used") == 1
    section.settle()
    assert findings.notes == [
        "part.none is null, as if it were left out",
        "part.default asks for what is so anyway",
        "part.other is not honoured: there is nothing here that does it",
        "part.off is off, and so it is here",
    ]
    assert findings.warnings == ["part.other is not honoured: there is nothing here that does it"]
