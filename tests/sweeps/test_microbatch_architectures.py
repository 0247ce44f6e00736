"""Language models of transformers in slices of their batch: as by whole batches, or refused by name."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn

import graphopt
from graphopt import PassError
from graphopt.passes import Microbatch
from tests.support.text_architectures import TEXT

pytestmark = pytest.mark.sweep


def of_transformers(model: nn.Module, **batch: Any) -> torch.Tensor:
    return model(**batch).loss  # type: ignore[no-any-return]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", [one.name for one in TEXT[::3]])  # what mixes samples is alike in many of them
def test_language_models_train_as_by_whole_batches_or_are_refused_by_name(name: str) -> None:
    (architecture,) = (one for one in TEXT if one.name == name)
    model, parts = architecture.build(2)
    batch = {key: torch.cat([part[key] for part in parts]) for key in parts[0]}
    model = model.double()
    other = copy.deepcopy(model)
    found = []
    for trained_model, passes in ((other, []), (model, [Microbatch(3)])):
        optimizer = torch.optim.SGD(trained_model.parameters(), lr=0.01)
        step = graphopt.optimize_step(trained_model, optimizer, passes, loss=of_transformers)
        torch.manual_seed(1)
        try:
            found.append(step(**batch).detach())
        except graphopt.CaptureError:
            assert not found  # neither is captured
            return
        except RuntimeError:
            with pytest.raises(RuntimeError):  # nor does it run in eager mode, where it has a number in float32
                other(**batch)
            return
        except PassError as error:
            assert re.search("may mix samples|depends on other rows", str(error))  # noqa: PT017 - either way is right
            return
    torch.testing.assert_close(found[0], found[1], rtol=1e-6, atol=1e-6)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=0, atol=1e-9)
