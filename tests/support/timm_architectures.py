"""Image models of timm, one small model of each of its families, as models that give their loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import timm
import torch
from torch import nn
from torch.nn import functional as F
from transformers.modeling_outputs import ImageClassifierOutput

from tests.support.tiny_models import CLASSES, ROWS, Batch

__all__ = ["TIMM"]


class _Classifier(nn.Module):
    """A model of timm that is called with labels, and gives its loss as models of transformers do."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        logits = self.model(pixel_values)
        if isinstance(logits, (tuple, list)):  # one for each head
            logits = sum(logits) / len(logits)
        return ImageClassifierOutput(loss=F.cross_entropy(logits, labels), logits=logits)


@dataclass(frozen=True)
class TimmModel:
    """One model of timm.

    Attributes:
        name: of the model.
        size: pixels of the square images.
        sizes: further arguments of ``timm.create_model``.
    """

    name: str
    size: int
    sizes: dict[str, Any]

    def build(self, batches: int) -> tuple[nn.Module, list[Batch]]:
        """The model in training mode, and batches of one shape, the same numbers every time."""
        torch.manual_seed(0)
        model = _Classifier(timm.create_model(self.name, num_classes=CLASSES, **self.sizes)).train()
        return model, [self._batch() for _ in range(batches)]

    def _batch(self) -> Batch:
        return {"pixel_values": torch.randn(ROWS, 3, self.size, self.size), "labels": torch.randint(CLASSES, (ROWS,))}


ANY_SIZE: dict[int, list[str]] = {
    64: [
        "cpubone_nano",
        "crossvit_tiny_240",
        "cs3darknet_focus_s",
        "csatv2",
        "cspnext_tiny",
        "densenet121",
        "dla46x_c",
        "dpn48b",
        "edgenext_xx_small",
        "efficientvim_m1",
        "efficientvit_b0",
        "efficientvit_m0",
        "ese_vovnet19b_slim_dw",
        "fasternet_t0",
        "fastvit_t8",
        "ghostnet_050",
        "hardcorenas_b",
        "hgnetv2_b0",
        "hrnet_w18_small",
        "iformer_t",
        "inception_next_atto",
        "lcnet_035",
        "lcnetv2_small",
        "legacy_seresnet18",
        "lowformer_b0",
        "mobilevit_xxs",
        "poolformerv2_s12",
        "pvt_v2_b0",
        "regnetx_002",
        "repghostnet_050",
        "repvit_m1",
        "resnest14d",
        "resnetv2_18",
        "rexnet_100",
        "shvit_s1",
        "skresnet18",
        "starnet_s050",
        "swiftformer_xs",
        "test_byobnet",
        "test_convnext",
        "test_efficientnet",
        "test_mambaout",
        "test_nfnet",
        "test_resnet",
        "test_vit",
        "tiny_vit_5m_224",
        "vit_tiny_patch16_dinov3_qkvb",
        "xcit_nano_12_p8_224",
    ],
    224: ["efficientformer_l1"],
}
"""Models whose images may have any size, by the size that they get."""

GIVEN_SIZE: dict[int, list[str]] = {
    64: [
        "cait_xxs24_224",
        "coat_tiny",
        "convit_tiny",
        "deit_tiny_patch16_224",
        "efficientformerv2_s0",
        "gcvit_xxtiny",
        "gmlp_ti16_224",
        "levit_128s",
        "nest_tiny",
        "pit_ti_224",
        "test_coatnet",
        "test_vit_relpos",
        "visformer_tiny",
        "vit_tiny_r_s16_p8_224",
    ],
}
"""Models that are made for a size of images."""

TIMM = {
    **{name: TimmModel(name, size, {}) for size, names in ANY_SIZE.items() for name in names},
    **{name: TimmModel(name, size, {"img_size": size}) for size, names in GIVEN_SIZE.items() for name in names},
}
