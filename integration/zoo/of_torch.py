"""Models of torch alone, one for each habit of others that once made a cut fail."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor, nn

from cerebro_hydra.recipe import Columns
from cerebro_hydra.shards.cut.sample import Example
from integration.zoo.architecture import CLASSES, WORDS, Architecture, Task

WIDTH = 8


def _rows_of_vectors(rows: int, g: torch.Generator) -> Example:
    labels = torch.randint(CLASSES, (rows,), generator=g)
    return (torch.randn(rows, WIDTH, generator=g),), (labels,)


def _rows_of_words(rows: int, g: torch.Generator) -> Example:
    labels = torch.randint(CLASSES, (rows,), generator=g)
    return (torch.randint(WORDS, (rows, 5), generator=g),), (labels,)


VECTORS = Task(Columns(("x",), ("labels",)), _rows_of_vectors, nn.CrossEntropyLoss())
BAGS = Task(Columns(("x",), ("labels",)), _rows_of_words, nn.CrossEntropyLoss())


class _Block(nn.Module):
    """A layer, what follows it, and a child that may be other blocks' too."""

    def __init__(self, after: nn.Module, child: nn.Module | None = None) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH) if child is None else child
        self.own, self.after = nn.Linear(WIDTH, WIDTH), after

    def forward(self, x: Tensor) -> Tensor:
        return x + self.after(self.own(self.child(x)))


class _Blocks(nn.Module):
    def __init__(self, after: Callable[[], nn.Module], shared: bool = False) -> None:
        super().__init__()
        self.child = nn.Linear(WIDTH, WIDTH) if shared else None
        self.blocks = nn.ModuleList(_Block(after(), self.child) for _ in range(4))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class _Sparse(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH, sparse=True)
        self.body = _Blocks(nn.Tanh)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(self.embed(x).mean(1))


class _SwitchesItsNorm(_Blocks):
    """Puts its norm into evaluation for its second use, in every forward."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh)
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        self.norm.eval()
        x = self.norm(x)
        self.norm.train(self.training)
        return super().forward(x)


class _Infers(_Blocks):
    """Has a frozen backbone in inference mode."""

    def __init__(self) -> None:
        super().__init__(nn.Tanh)
        self.backbone = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        with torch.inference_mode():
            x = self.backbone(x)
        return super().forward(x.clone())


def _shared() -> nn.Module:
    return _Blocks(nn.Tanh, shared=True)


def _alpha_dropout() -> nn.Module:
    return _Blocks(lambda: nn.AlphaDropout(0.2))


def _compiled() -> nn.Module:
    return torch.compile(_Blocks(nn.Tanh), backend="eager")  # type: ignore[return-value]


def _logging() -> nn.Module:
    model, log = _Blocks(nn.Tanh), logging.getLogger(__name__).debug
    model.blocks[1].register_full_backward_hook(lambda *given: log("%s", given[2][0].norm()))
    return model


def _scaled() -> nn.Module:
    model = _Blocks(nn.Tanh)
    model.register_forward_pre_hook(lambda module, args: (args[0] * 1.5,))
    return model


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def _adagrad(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adagrad(model.parameters(), lr=0.1)


ARCHITECTURES = (
    Architecture("a child that blocks share", "torch", VECTORS, _shared),
    Architecture("rrelu", "torch", VECTORS, lambda: _Blocks(nn.RReLU)),
    Architecture("alpha dropout", "torch", VECTORS, _alpha_dropout),
    Architecture("sparse embedding", "torch", BAGS, _Sparse, _sgd),
    Architecture("sparse embedding with Adagrad", "torch", BAGS, _Sparse, _adagrad),
    Architecture("compiled", "torch", VECTORS, _compiled),
    Architecture("a backward hook that logs", "torch", VECTORS, _logging),
    Architecture("a hook that reads the first argument", "torch", VECTORS, _scaled),
    Architecture("a norm that is switched", "torch", VECTORS, _SwitchesItsNorm),
    Architecture("a backbone in inference mode", "torch", VECTORS, _Infers),
)
