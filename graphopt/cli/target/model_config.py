"""``hf:config.json`` as a target: a model of ``transformers`` made of its configuration, without data and without code.

The file is data: its ``model_type`` and ``architectures`` are looked up among the classes that the installed library
has, and a configuration that names code of its own is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from graphopt.capture.devices.meta_tensors import without_data
from graphopt.errors import GraphoptError, did_you_mean, quoted
from graphopt.runtime.drop_in.requirements import required

__all__ = ["model_of_config"]

_LARGEST_FILE = 1_000_000
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_FAMILIES = ("AutoModelForCausalLM", "AutoModelForMaskedLM", "AutoModelForSeq2SeqLM")
"""The models that are made, the first that there is for a configuration; all take tokens and labels."""

_CODE = ("auto_map", "custom_pipelines", "trust_remote_code")


def model_of_config(path: Path, *, batch: int, tokens: int, dtype: str | None = None) -> dict[str, Any]:
    """The parts of a step, as a factory returns them: model, batch of token numbers and labels, AdamW (fused).

    Args:
        path: of a JSON file with ``model_type`` and the sizes of the model, as ``transformers`` writes them.
        batch: sequences in a batch.
        tokens: of each sequence.
        dtype: of the parameters, ``float32``, ``bfloat16`` or ``float16``; that of the file, else bfloat16, by default.

    Raises:
        GraphoptError: for a file that is no such configuration; for more tokens than the model has places for.
    """
    transformers = required("transformers", "transformers")
    data = _read(path)
    config = _config(transformers, data, path)
    places = getattr(config, "max_position_embeddings", None)
    if isinstance(places, int) and tokens > places:
        raise GraphoptError(f"--tokens {tokens}: {path} has max_position_embeddings = {places}: give at most as many")
    config.use_cache = False
    model = _model(transformers, config, data, path, _dtype(data, dtype))
    model.train()
    with without_data():
        numbers = torch.zeros(batch, tokens, dtype=torch.int64)
    return {
        "model": model,
        "kwargs": {"input_ids": numbers, "labels": numbers},
        "loss": True,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    }


def _read(path: Path) -> dict[str, Any]:
    if path.stat().st_size > _LARGEST_FILE:
        raise GraphoptError(f"{path} has {path.stat().st_size} bytes, and a configuration has {_LARGEST_FILE} at most")
    try:
        data = json.loads(path.read_text("utf-8"))
    except (ValueError, RecursionError) as error:
        raise GraphoptError(f"{path} is not JSON: {error}") from error
    if not isinstance(data, dict) or not isinstance(data.get("model_type"), str):
        raise GraphoptError(f"{path} is no configuration of transformers: it needs a 'model_type', such as \"llama\"")
    for key in _CODE:
        if data.get(key):
            raise GraphoptError(f"{path}: {key!r} names code outside of transformers, and a file's code is not run")
    if data.get("quantization_config"):
        raise GraphoptError(f"{path}: 'quantization_config' is for inference; a step is planned in a floating dtype")
    return data


def _config(transformers: Any, data: Mapping[str, Any], path: Path) -> Any:
    known = transformers.models.auto.configuration_auto.CONFIG_MAPPING_NAMES
    kind = data["model_type"]
    if kind not in known:
        raise GraphoptError(f"{path}: transformers has no model_type {kind!r:.80}; {did_you_mean(kind, known)}")
    given = {key: value for key, value in data.items() if key not in ("model_type", "torch_dtype", "dtype")}
    try:
        return transformers.AutoConfig.for_model(kind, **given)
    except Exception as error:  # each class of configuration checks its own fields
        raise GraphoptError(f"{path}: transformers refuses this configuration: {quoted(error)}") from error


def _model(transformers: Any, config: Any, data: Mapping[str, Any], path: Path, dtype: torch.dtype) -> Any:
    names = data.get("architectures") or []
    families = [family for name in _FAMILIES if type(config) in (family := getattr(transformers, name))._model_mapping]
    if not families:
        raise GraphoptError(
            f"{path}: transformers has no language model for {data['model_type']!r:.80}: give a factory as the target"
        )
    wanted = [family for family in families if family._model_mapping[type(config)].__name__ in names]
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(dtype)
        with without_data():
            return (wanted or families)[0].from_config(config)
    except GraphoptError:
        raise
    except Exception as error:
        raise GraphoptError(f"{path}: the model cannot be made: {quoted(error)}") from error
    finally:
        torch.set_default_dtype(before)


def _dtype(data: Mapping[str, Any], given: str | None) -> torch.dtype:
    name = given or str(data.get("torch_dtype") or data.get("dtype") or "bfloat16")
    if name not in _DTYPES:
        raise GraphoptError(f"{name!r:.80} is no dtype of parameters: one of {', '.join(_DTYPES)}")
    return _DTYPES[name]
