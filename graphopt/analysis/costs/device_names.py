"""The devices of which published figures are known, and the names of cost models; nothing here needs torch."""

from __future__ import annotations

import re
from pathlib import Path

from graphopt.errors import near_words

__all__ = ["COSTS", "DEVICES", "DEVICE_FOLDER", "FileOr", "is_profile_file", "near_devices"]

DEVICE_FOLDER = Path(__file__).parent / "devices"
"""A file for each of ``DEVICES``, in the form of ``DeviceProfile.load``, with its sources."""

DEVICES = tuple(sorted(path.stem for path in DEVICE_FOLDER.glob("*.toml")))
"""The devices of ``graphopt.analysis.costs.profiles.PROFILES``."""

COSTS = ("measured", "roofline", *DEVICES)
"""The names of cost models: measured on this device, its roofline, the roofline of a device by name."""

_SUFFIX = ".toml"


class FileOr(tuple[str, ...]):
    """Words that an option takes beside files with profiles: it has such files without listing them."""

    __slots__ = ()

    def __contains__(self, word: object) -> bool:
        return tuple.__contains__(self, word) or (isinstance(word, str) and is_profile_file(word))


def is_profile_file(text: str) -> bool:
    """Whether a text is the path of a file with a profile, and no name: it ends in ``.toml``."""
    return text.lower().endswith(_SUFFIX)


def near_devices(text: str) -> list[str]:
    """The devices that were probably meant: by most words of their names (``A100``, ``NVIDIA H100 PCIe``)."""
    words = set(re.split(r"[^a-z0-9]+", text.lower())) - {""}
    words |= {f"{word}gb" for word in words if word.isdecimal()}
    shared = {name: len(words & set(name.split("-"))) for name in DEVICES if _model(name) & words}
    named = [name for name, count in shared.items() if count == max(shared.values())]
    exact = [name for name in named if set(name.split("-")) <= words]
    return exact or named or near_words(text, DEVICES) or _of_near_model(text)


def _of_near_model(text: str) -> list[str]:
    """The devices of the model that is closest to a word: ``h101`` is next to ``h100``."""
    models = {model for name in DEVICES for model in _model(name)}
    near = near_words(text, models, 1)
    return [name for name in DEVICES if _model(name) & set(near)]


def _model(name: str) -> set[str]:
    """The words of a device's name that say which it is: one with a digit that is not its bytes."""
    return {word for word in name.split("-") if any(map(str.isdigit, word)) and not word.endswith("gb")}
