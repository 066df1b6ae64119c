"""Models of images and vectors, as people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def mlp(features: int, hidden: int, classes: int, dropout: float = 0.2) -> nn.Sequential:
    return nn.Sequential(
        nn.Linear(features, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(hidden, hidden), nn.ReLU(inplace=True), nn.Dropout(dropout),
        nn.Linear(hidden, classes),
    )  # fmt: skip


class BasicBlock(nn.Module):
    """Two convolutions and a skip connection, as in torchvision."""

    def __init__(self, before: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(before, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.downsample = None
        if stride != 1 or before != width:
            self.downsample = nn.Sequential(
                nn.Conv2d(before, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn2(self.conv2(out))
        out += identity
        return self.relu(out)


class ResNet18(nn.Module):
    """The 18 layers of torchvision's `resnet18`, at any width."""

    layer1: nn.Sequential
    layer2: nn.Sequential
    layer3: nn.Sequential
    layer4: nn.Sequential

    def __init__(self, width: int, classes: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, 3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(3, 2, 1)
        before = width
        for number in range(4):
            after = width * 2**number
            first = BasicBlock(before, after, 1 if number == 0 else 2)
            layer = nn.Sequential(first, BasicBlock(after, after, 1))
            setattr(self, f"layer{number + 1}", layer)
            before = after
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(before, classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def vit(hidden: int, layers: int, image: int, patch: int, classes: int) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=hidden, num_hidden_layers=layers, num_attention_heads=max(2, hidden // 64),
        intermediate_size=4 * hidden, image_size=image, patch_size=patch, num_channels=3,
        num_labels=classes, hidden_dropout_prob=0.1, attention_probs_dropout_prob=0.1,
    )  # fmt: skip
    return ViTForImageClassification(config)
