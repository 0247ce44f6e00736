"""Names that try to be more than names, and what is left of them where they are shown."""

from __future__ import annotations

import re
from dataclasses import replace
from html.parser import HTMLParser

import torch
from torch import nn

from graphopt import Program
from graphopt.ir.context import Context
from graphopt.ir.node import info, set_info
from tests.support.training import captured

ATTACK = "</script><img src=x onerror=alert(1)><script>alert(2)</script>]]>"
TURNED = "safe\u202eslarutan\u2066"
STEERING = "red\x1b[31m\x1b]0;title\x07\x9b2J\r\x08"
QUOTES = "\"'`&amp;{{style}}${alert(3)}\\"
LONG = "long" * 2500
NAMES = (ATTACK, TURNED, STEERING, QUOTES, LONG)

_COLORS = re.compile(r"\x1b\[[0-9;]*m")


def hostile() -> Program:
    """A program in which names of modules, tensors, files, passes and the model itself are hostile."""
    layers = [nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)]
    program = captured(nn.Sequential(*layers), torch.zeros(2, 4))
    for number, node in enumerate(program.nodes[:-1]):
        name = NAMES[number % len(NAMES)]
        module = name.replace(".", "")
        known = replace(info(node), module=module, names=(f"{name}{number}",), source=f"/{name}:1 in {name}")
        set_info(node, replace(known, origin=ATTACK))
    program.title = ATTACK + TURNED + STEERING + LONG
    program.context = Context(history=(ATTACK, STEERING))
    return program


def assert_steers_nothing(written: str) -> None:
    """What a terminal got holds no control characters but colors and line breaks, and does not turn writing around."""
    text = _COLORS.sub("", written)
    found = {letter for letter in text if (ord(letter) < 32 and letter != "\n") or 0x7F <= ord(letter) < 0xA0}
    assert not found
    assert not set("\u202e\u2066") & set(text)


class _Elements(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}


def assert_only_text(page: str) -> None:
    """HTML in which no name has become an element or an attribute."""
    parser = _Elements()
    parser.feed(page)
    assert not parser.tags & {"script", "img", "iframe"}
    assert not [name for name in parser.attributes if name.startswith("on")]
    assert not [letter for letter in page if ord(letter) < 32 and letter not in "\n\t\r"]
    page.encode("utf-8")
