"""Architectures of torchvision, in small configurations with random weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from integration.zoo.architecture import CLASSES, Architecture, images


def _architecture(name: str, build: Callable[[Any], nn.Module], size: int = 32) -> Architecture:
    def built() -> nn.Module:
        from torchvision import models

        return build(models)

    return Architecture(name, "torchvision", images(size, "x", nn.CrossEntropyLoss()), built)


def _named(name: str, **options: Any) -> Architecture:
    def build(models: Any) -> nn.Module:
        model: nn.Module = getattr(models, name)(weights=None, num_classes=CLASSES, **options)
        return model

    return _architecture(name, build)


def _convnext(models: Any) -> nn.Module:
    block = models.convnext.CNBlockConfig
    blocks = [block(8, 16, 1), block(16, 16, 2), block(16, None, 1)]
    return models.ConvNeXt(blocks, stochastic_depth_prob=0.3, num_classes=CLASSES)


def _densenet(models: Any) -> nn.Module:
    return models.DenseNet(8, (2, 2, 2), 16, drop_rate=0.1, num_classes=CLASSES)


def _efficientnet(models: Any) -> nn.Module:
    block = models.efficientnet.MBConvConfig
    blocks = [block(1, 3, 1, 8, 8, 1, 1.0, 1.0), block(2, 3, 2, 8, 16, 2, 1.0, 1.0)]
    return models.EfficientNet(
        blocks, dropout=0.1, stochastic_depth_prob=0.3, num_classes=CLASSES, last_channel=32
    )


def _maxvit(models: Any) -> nn.Module:
    return models.MaxVit(
        (32, 32), 8, 4, [8, 16], [1, 1], 4, stochastic_depth_prob=0.3, num_classes=CLASSES
    )


def _regnet(models: Any) -> nn.Module:
    blocks = models.regnet.BlockParams([1, 2, 1], [8, 16, 16], [8, 8, 8], [1.0] * 3, [2] * 3, 0.25)
    return models.RegNet(blocks, num_classes=CLASSES, stem_width=8)


def _resnet(models: Any) -> nn.Module:
    model = models.ResNet(models.resnet.BasicBlock, [1, 1, 1, 1])
    model.layer3, model.layer4, model.fc = nn.Identity(), nn.Identity(), nn.Linear(128, CLASSES)
    return model


def _shufflenet(models: Any) -> nn.Module:
    return models.ShuffleNetV2([2, 2, 2], [8, 16, 32, 32, 32], num_classes=CLASSES)


def _swin(version: str) -> Callable[[Any], nn.Module]:
    def build(models: Any) -> nn.Module:
        blocks = (
            {}
            if version == "swin_transformer"
            else {
                "block": models.swin_transformer.SwinTransformerBlockV2,
                "downsample_layer": models.swin_transformer.PatchMergingV2,
            }
        )
        return models.SwinTransformer(
            [2, 2], 8, [2, 2], [1, 2], [4, 4], dropout=0.1, stochastic_depth_prob=0.3,
            num_classes=CLASSES, **blocks,
        )  # fmt: skip

    return build


def _vit(models: Any) -> nn.Module:
    return models.VisionTransformer(16, 8, 3, 2, 16, 32, dropout=0.1, num_classes=CLASSES)


ARCHITECTURES = (
    _architecture("convnext", _convnext),
    _architecture("densenet", _densenet),
    _architecture("efficientnet", _efficientnet),
    _architecture("maxvit", _maxvit),
    _architecture("mnasnet", lambda models: models.MNASNet(0.2, CLASSES)),
    _named("mobilenet_v2", width_mult=0.25),
    _named("mobilenet_v3_small", width_mult=0.5),
    _architecture("regnet", _regnet),
    _architecture("resnet", _resnet),
    _architecture("shufflenet_v2", _shufflenet),
    _named("squeezenet1_1"),
    _architecture("swin_transformer", _swin("swin_transformer"), size=16),
    _architecture("swin_transformer_v2", _swin("swin_transformer_v2"), size=16),
    _architecture("vision_transformer", _vit, size=16),
)
