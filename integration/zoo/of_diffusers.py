"""Denoisers and autoencoders of diffusers, in small configurations with random weights."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns
from cerebro_hydra.shards.cut.sample import Example
from integration.zoo.architecture import CLASSES, Architecture, Task

SIZE, CHANNELS, WIDTH, STEPS = 8, 4, 16, 10
WORDS_OF_PROMPT = 5


def _noisy(rows: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(rows, CHANNELS, SIZE, SIZE, generator=g), _steps(rows, g)


def _steps(rows: int, g: torch.Generator) -> Tensor:
    return torch.randint(STEPS, (rows,), generator=g)


def _noise(rows: int, g: torch.Generator) -> tuple[Tensor]:
    return (torch.randn(rows, CHANNELS, SIZE, SIZE, generator=g),)


def _prompt(rows: int, g: torch.Generator, width: int = WIDTH) -> Tensor:
    return torch.randn(rows, WORDS_OF_PROMPT, width, generator=g)


def _of_noise(rows: int, g: torch.Generator) -> Example:
    return _noisy(rows, g), _noise(rows, g)


def _of_prompted_noise(rows: int, g: torch.Generator) -> Example:
    return (*_noisy(rows, g), _prompt(rows, g)), _noise(rows, g)


def _of_pooled_noise(rows: int, g: torch.Generator) -> Example:
    pooled = torch.randn(rows, WIDTH, generator=g)
    return (*_noisy(rows, g), _prompt(rows, g), pooled), _noise(rows, g)


def _of_classes_of_noise(rows: int, g: torch.Generator) -> Example:
    classes = torch.randint(CLASSES, (rows,), generator=g)
    return (*_noisy(rows, g), classes), _noise(rows, g)


def _of_images(rows: int, g: torch.Generator) -> Example:
    image = torch.randn(rows, CHANNELS, SIZE, SIZE, generator=g)
    return (image,), (image.clone(),)


class _OfCodes(nn.Module):
    """Compares an image with what its codes give, and adds how far these are from it."""

    def forward(self, outputs: Any, image: Tensor) -> Tensor:
        apart: Tensor = outputs.commit_loss
        return nn.functional.mse_loss(outputs.sample, image) + apart.mean()


def _task(features: tuple[str, ...], draw: Any, loss: nn.Module | None = None) -> Task:
    return Task(Columns(features, ("target",)), draw, loss or nn.MSELoss())


NOISE = _task(("sample", "timestep"), _of_noise)
PROMPTED_NOISE = _task(("sample", "timestep", "encoder_hidden_states"), _of_prompted_noise)
NOISE_OF_CLASSES = _task(("hidden_states", "timestep", "class_labels"), _of_classes_of_noise)
PROMPTED_STATES = _task(("hidden_states", "timestep", "encoder_hidden_states"), _of_prompted_noise)
POOLED_STATES = _task(
    ("hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"), _of_pooled_noise
)
IMAGES = _task(("sample",), _of_images)
IMAGES_BY_CODES = _task(("sample",), _of_images, _OfCodes())


def _architecture(name: str, class_name: str, task: Task, **config: Any) -> Architecture:
    def build() -> nn.Module:
        import diffusers

        model: nn.Module = getattr(diffusers, class_name)(**config)
        return _filled(model)

    return Architecture(name, "diffusers", task, build)


def _filled(model: nn.Module) -> nn.Module:
    """Draw weights that begin at zero, which would keep blocks from passing gradients."""
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return model


_UNET = {"sample_size": SIZE, "in_channels": CHANNELS, "out_channels": CHANNELS,
         "block_out_channels": (8, 16), "layers_per_block": 1, "norm_num_groups": 4}  # fmt: skip
_BLOCKS = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 3}
_TRANSFORMER = {**_BLOCKS, "in_channels": CHANNELS, "out_channels": CHANNELS, "sample_size": SIZE,
                "patch_size": 2}  # fmt: skip
_VAE = {"in_channels": CHANNELS, "out_channels": CHANNELS, "block_out_channels": (8, 16),
        "norm_num_groups": 4, "sample_size": SIZE,
        "down_block_types": ("DownEncoderBlock2D",) * 2,
        "up_block_types": ("UpDecoderBlock2D",) * 2}  # fmt: skip

ARCHITECTURES = (
    _architecture("unet_2d", "UNet2DModel", NOISE, **_UNET, attention_head_dim=8, dropout=0.1,
                  down_block_types=("DownBlock2D", "AttnDownBlock2D"),
                  up_block_types=("AttnUpBlock2D", "UpBlock2D")),
    _architecture("unet_2d_condition", "UNet2DConditionModel", PROMPTED_NOISE, **_UNET,
                  attention_head_dim=2, cross_attention_dim=WIDTH,
                  down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"),
                  up_block_types=("UpBlock2D", "CrossAttnUpBlock2D")),
    _architecture("dit", "DiTTransformer2DModel", NOISE_OF_CLASSES, **_TRANSFORMER, dropout=0.1,
                  norm_num_groups=4, num_embeds_ada_norm=STEPS),
    _architecture("pixart", "PixArtTransformer2DModel", PROMPTED_STATES, **_TRANSFORMER,
                  norm_num_groups=4, cross_attention_dim=WIDTH, caption_channels=WIDTH),
    _architecture("stable_diffusion_3", "SD3Transformer2DModel", POOLED_STATES, **_TRANSFORMER,
                  joint_attention_dim=WIDTH, caption_projection_dim=WIDTH,
                  pooled_projection_dim=WIDTH, pos_embed_max_size=SIZE),
    _architecture("autoencoder_kl", "AutoencoderKL", IMAGES, **_VAE),
    _architecture("vq_model", "VQModel", IMAGES_BY_CODES, **_VAE, num_vq_embeddings=16),
)  # fmt: skip
