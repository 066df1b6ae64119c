"""Adapters of peft around small models of transformers with random weights, which stay frozen."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from integration.zoo.architecture import SENTENCES, TEXT, WORDS, Architecture, Task
from integration.zoo.of_transformers import BY_TYPE

VIRTUAL = 4
"""Tokens that a prompt adds to each text."""


def _adapted(
    name: str, base: str, task: str, kind: str, on: Task = TEXT, **config: Any
) -> Architecture:
    """Put an adapter around a model of the zoo.

    Args:
        base: its name there.
        task: what peft calls its task.
        kind: the class of the adapter's configuration, without "Config".
    """

    def build() -> nn.Module:
        import peft

        adapter = getattr(peft, f"{kind}Config")(task_type=task, **config)
        model: nn.Module = peft.get_peft_model(BY_TYPE[base].build(), adapter)
        return _filled(model)

    return Architecture(f"{name} on {base}", "peft", on, build)


def _filled(model: nn.Module) -> nn.Module:
    """Draw what begins at zero, as adapters do, so that from the first step all of it matters."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad and not parameter.any():
                nn.init.normal_(parameter, std=0.02)
    return model


def _text(name: str, base: str, kind: str, **config: Any) -> Architecture:
    return _adapted(name, base, "CAUSAL_LM", kind, **config)


def _classes(name: str, base: str, kind: str, **config: Any) -> Architecture:
    return _adapted(name, base, "SEQ_CLS", kind, SENTENCES, **config)


_OF_LLAMA = {"target_modules": ["q_proj", "v_proj"]}
_PROMPT = {"num_virtual_tokens": VIRTUAL}

ARCHITECTURES = (
    _text("lora", "llama", "Lora", r=2, lora_dropout=0.1, **_OF_LLAMA),
    _classes("lora", "bert", "Lora", r=2, lora_dropout=0.1, target_modules=["query", "value"]),
    _text("dora", "llama", "Lora", r=2, use_dora=True, **_OF_LLAMA),
    _text("adalora", "llama", "AdaLora", init_r=4, target_r=2, tinit=1, tfinal=1, total_step=10,
          **_OF_LLAMA),
    _text("ia3", "llama", "IA3", target_modules=["k_proj", "v_proj", "down_proj"],
          feedforward_modules=["down_proj"]),
    _text("loha", "llama", "LoHa", r=2, **_OF_LLAMA),
    _text("vera", "llama", "Vera", r=2, **_OF_LLAMA),
    _text("prefix tuning", "llama", "PrefixTuning", **_PROMPT),
    _text("prompt tuning", "gpt2", "PromptTuning", **_PROMPT),
    _text("p-tuning", "gpt2", "PromptEncoder", **_PROMPT, encoder_hidden_size=8),
    _classes("prompt tuning", "bert", "PromptTuning", **_PROMPT),
    _text("trainable tokens", "llama", "TrainableTokens", token_indices=[*range(3, WORDS, 7)],
          target_modules=["embed_tokens"]),
)  # fmt: skip
