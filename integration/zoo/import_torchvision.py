"""Imports torchvision, also where its compiled operators don't fit this build of torch.

Its wheels on PyPI are for torch with CUDA. The models here use none of these operators, but the
import registers how two of them run without data, which needs their signatures.
"""

from __future__ import annotations

import torch

try:
    import torchvision
except RuntimeError:
    _SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
    _LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
    for _operator in ("nms", "qnms"):
        _LIBRARY.define(_operator + _SIGNATURE)
    import torchvision

__all__ = ["torchvision"]
