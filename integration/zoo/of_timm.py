"""Architectures of timm, in small configurations with random weights."""

from __future__ import annotations

import importlib
from typing import Any

from torch import nn

from integration.zoo.architecture import CLASSES, Architecture, images


def _architecture(name: str, size: int = 32, **options: Any) -> Architecture:
    def build() -> nn.Module:
        from timm import create_model

        model: nn.Module = create_model(name, pretrained=False, num_classes=CLASSES, **options)
        return model

    return Architecture(name, "timm", images(size, "x", nn.CrossEntropyLoss()), build)


def _of_class(name: str, module: str, class_name: str, size: int, **options: Any) -> Architecture:
    """Build a model whose function in timm fixes the sizes; strings name classes of its module."""

    def build() -> nn.Module:
        source = importlib.import_module(f"timm.models.{module}")
        given = {k: getattr(source, v) if isinstance(v, str) else v for k, v in options.items()}
        model: nn.Module = getattr(source, class_name)(num_classes=CLASSES, **given)
        return model

    return Architecture(name, "timm", images(size, "x", nn.CrossEntropyLoss()), build)


_VIT: dict[str, Any] = {
    "img_size": 16,
    "patch_size": 8,
    "embed_dim": 16,
    "depth": 3,
    "num_heads": 2,
}
_MIXER: dict[str, Any] = {"img_size": 16, "patch_size": 8, "embed_dim": 16, "num_blocks": 3}
_DROPPED: dict[str, Any] = {"drop_path_rate": 0.3}
_STAGES: dict[str, Any] = {"dims": (8, 8, 16, 16), "depths": (1, 1, 1, 1)}

ARCHITECTURES = (
    _architecture("cait_xxs24_224", 16, **_VIT, **_DROPPED),
    _of_class("coat", "coat", "CoaT", 32, img_size=32, patch_size=4, embed_dims=(16, 16, 16, 16),
              serial_depths=(3, 1, 1, 1), mlp_ratios=(2, 2, 2, 2)),
    _of_class("convmixer", "convmixer", "ConvMixer", 16, dim=16, depth=3, kernel_size=3,
              patch_size=4),
    _architecture("convnextv2_atto", **_STAGES, **_DROPPED),
    _architecture("deit_tiny_distilled_patch16_224", 16, **_VIT),
    _architecture("edgenext_xx_small", **_STAGES, heads=(2, 2, 2, 2)),
    _architecture("efficientvit_b0", widths=(4, 8, 8, 16, 16), head_widths=(16, 16)),
    _architecture("eva02_tiny_patch14_224", 16, **_VIT),
    _of_class("focalnet", "focalnet", "FocalNet", 32, embed_dim=8, depths=(1, 1, 1, 1), **_DROPPED),
    _of_class("gmlp", "mlp_mixer", "MlpMixer", 16, **_MIXER, mlp_ratio=6,
              block_layer="SpatialGatingBlock", mlp_layer="GatedMlp"),
    _architecture("lcnet_035"),
    _architecture("levit_128s", 64, img_size=64, embed_dim=(16, 16, 16), key_dim=8,
                  num_heads=(2, 2, 2), depth=(1, 1, 1)),
    _architecture("mambaout_femto", **_STAGES),
    _of_class("mlp_mixer", "mlp_mixer", "MlpMixer", 16, **_MIXER),
    _architecture("pit_ti_224", img_size=32, patch_size=8, stride=8, base_dims=(8, 8, 8),
                  depth=(1, 1, 1), heads=(1, 2, 2)),
    _architecture("pvt_v2_b0", embed_dims=(8, 8, 16, 16), depths=(1, 1, 1, 1),
                  num_heads=(1, 1, 2, 2)),
    _architecture("swinv2_tiny_window8_256", img_size=32, embed_dim=8, depths=(1, 1),
                  num_heads=(1, 2), window_size=4),
    _architecture("vit_tiny_patch16_224", 16, **_VIT, drop_rate=0.1, **_DROPPED),
    _architecture("xcit_nano_12_p16_224", img_size=32, embed_dim=16, depth=2, num_heads=2),
)  # fmt: skip
