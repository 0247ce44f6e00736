"""YAML as plain data: no tags, no aliases, no name twice. PyYAML is optional, and imported when it is needed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from graphopt.errors import GraphoptError

__all__ = ["read_yaml", "yaml_text"]

_LARGEST = 50_000
"""Characters of a document: PyYAML takes up to 20 µs for each."""

_DEEPEST = 100
"""Levels of brackets: behind each, PyYAML looks at all that are open, which takes seconds for some thousand."""


def read_yaml(text: str) -> Any:
    """The data of one document.

    Raises:
        GraphoptError: where PyYAML is not installed.
        ValueError: for what is not YAML; for more than 50,000 characters, and for brackets more than 100 levels deep;
            for aliases, by which a small text stands for a large one; for a name that stands twice in an object, and
            for tags.
    """
    yaml = _yaml()
    if len(text) > _LARGEST:
        raise ValueError(f"it has {len(text):,} characters, and at most {_LARGEST:,} are read")

    class Loader(yaml.SafeLoader):  # type: ignore[misc,name-defined]
        """Reads what JSON can hold, and dates, which the reader of an option refuses."""

        def fetch_flow_collection_start(self, token_class: Any) -> None:
            if self.flow_level >= _DEEPEST:
                raise yaml.scanner.ScannerError(None, None, "brackets are nested too deeply", self.get_mark())
            super().fetch_flow_collection_start(token_class)

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise yaml.composer.ComposerError(None, None, "aliases are not read", self.peek_event().start_mark)
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> Any:
            found = super().construct_mapping(node, deep=deep)
            if len(found) != len(node.value):
                raise yaml.constructor.ConstructorError(None, None, "a name stands twice", node.start_mark)
            return found

    try:
        return yaml.load(text, Loader=Loader)
    except yaml.YAMLError as error:
        raise ValueError(" ".join(str(error).split())) from None
    except (AttributeError, KeyError, OverflowError, TypeError) as error:  # from PyYAML itself, on odd texts
        raise ValueError(f"{type(error).__name__} while it was read") from None


def yaml_text(data: Mapping[str, Any]) -> str:
    """A document of YAML.

    Raises:
        GraphoptError: where PyYAML is not installed.
    """
    text: str = _yaml().safe_dump(dict(data), sort_keys=False, allow_unicode=True, width=110)
    return text


def _yaml() -> Any:
    try:
        import yaml
    except ImportError:
        raise GraphoptError(
            "YAML needs PyYAML, which is not installed: pip install pyyaml, or write the file as TOML or JSON"
        ) from None
    return yaml
