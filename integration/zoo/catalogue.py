"""Lists every architecture of the zoo, in the order of its table."""

from __future__ import annotations

from integration.zoo.of_diffusers import ARCHITECTURES as OF_DIFFUSERS
from integration.zoo.of_peft import ARCHITECTURES as OF_PEFT
from integration.zoo.of_timm import ARCHITECTURES as OF_TIMM
from integration.zoo.of_torch import ARCHITECTURES as OF_TORCH
from integration.zoo.of_torchvision import ARCHITECTURES as OF_TORCHVISION
from integration.zoo.of_transformers import ARCHITECTURES as OF_TRANSFORMERS
from integration.zoo.of_users import ARCHITECTURES as OF_USERS

ARCHITECTURES = (
    OF_TRANSFORMERS + OF_TORCHVISION + OF_TIMM + OF_DIFFUSERS + OF_PEFT + OF_TORCH + OF_USERS
)
