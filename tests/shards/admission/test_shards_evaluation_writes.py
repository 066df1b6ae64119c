"""What a forward writes to buffers in evaluation: it is refused, unless every forward sets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.ao import quantization as q

from cerebro_hydra.errors import ConfigurationError
from tests.shards import zoo
from tests.shards.executors.executor_case import assert_equal_to_plain
from tests.shards.hopping import start
from tests.shards.trials import Make, made, mlp_recipe, two_sub_epochs

pytestmark = pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")

VECTORS = zoo.vectors(8, 5)


def writing(name: str, first: torch.Tensor, write: Callable[[torch.Tensor, torch.Tensor], object]):
    """Return a model that writes to a buffer in every forward, by what it had and the rows."""

    class Writes(zoo.Net):
        def add(self):
            self.register_buffer(name, first.clone())

        def forward(self, x):
            write(self.get_buffer(name), x)
            return super().forward(x)

    return Writes


class InEvaluationAlone(zoo.Net):
    def add(self):
        self.b.register_buffer("rows", torch.tensor(0))

    def forward(self, x):
        if not self.training:
            self.b.rows = self.b.rows + len(x)
        return super().forward(x)


class ReadsItsLastBatch(zoo.Net):
    """Sets its buffer anew, but after it has used the one of the batch before."""

    def add(self):
        self.register_buffer("last", torch.zeros(6))

    def forward(self, x):
        y = super().forward(x + self.last)
        self.last.copy_(x.detach().mean(0))
        return y


class TrainsItsNorm(zoo.Net):
    """Has a norm that takes the statistics of each batch, also in evaluation."""

    def add(self):
        self.norm = nn.BatchNorm1d(6)

    def forward(self, x):
        self.norm.train()
        return super().forward(self.norm(x))


def test_a_norm_that_trains_in_evaluation_is_refused_with_what_to_do() -> None:
    told = r"'norm\.\w+' in evaluation, .* follow the model's mode, .*track_running_stats=False"
    with pytest.raises(ConfigurationError, match=told):
        start(made(TrainsItsNorm)(), zoo.singly(VECTORS))


class AsksForItsLastBatch(zoo.Net):
    """Sets its buffer anew, but after it has asked how large that of the batch before was."""

    def add(self):
        self.register_buffer("top", torch.zeros(()))

    def forward(self, x):
        y = super().forward(x * 2 if self.top > 0.3 else x)
        if not self.training:
            self.top.fill_(x.abs().mean())
        return y


def test_a_buffer_of_which_an_evaluation_asks_in_what_range_it_is_is_refused() -> None:
    with pytest.raises(
        ConfigurationError, match="the forward writes to buffer 'top' in evaluation"
    ):
        start(made(AsksForItsLastBatch)(), zoo.singly(VECTORS))


def writing_loss(model):
    def loss(outputs, labels):
        if not outputs.requires_grad:
            model.get_buffer("top").copy_(outputs.mean())
        return nn.functional.cross_entropy(outputs, labels)

    return loss


class HasTop(zoo.Net):
    def add(self):
        self.register_buffer("top", torch.zeros(()))


@pytest.mark.parametrize("batches", [VECTORS, VECTORS[:1]])
def test_a_loss_that_writes_to_a_buffer_of_the_model_in_evaluation_is_refused(batches) -> None:
    with pytest.raises(ConfigurationError, match=r"loss, a metric or the collate .*'top' in evalu"):
        start(made(HasTop, writing_loss)(), zoo.singly(batches))


class Switched(zoo.Net):
    """Notes its mode in a buffer, as modules that simulate numbers of 8 bits may."""

    def add(self):
        self.register_buffer("is_on", torch.ones(()))

    def train(self, mode=True):
        super().train(mode)
        if hasattr(self, "is_on"):
            self.is_on.fill_(mode)
        return self


def test_a_buffer_that_modes_set_is_refused_by_its_name() -> None:
    told = r"^train\(\) and eval\(\) write to buffer 'is_on', and evaluation must leave"
    with pytest.raises(ConfigurationError, match=told):
        start(made(Switched)(), zoo.singly(VECTORS))


class TrainsByIt(zoo.Net):
    """Evaluation sets a buffer anew, by which a part of training computes."""

    def __init__(self, read: str) -> None:
        self.read = read
        super().__init__()
        self.read = read

    def add(self):
        self.register_buffer("threshold", torch.zeros(()))
        self.register_buffer("seen", torch.zeros(()))
        self.register_buffer("other", torch.zeros(()))

    def forward(self, x):
        if not self.training:
            self.threshold.fill_(x.mean())
            self.other.fill_(0.2345)
            return super().forward(x)
        if self.read == "buffer":
            self.seen += self.threshold
        asked = {"if large": self.threshold > 0.3, "if in a range": 0.2 < self.threshold < 0.6}
        asked["if both are"] = 0.23 < self.other < 0.24 and self.threshold != 0
        reads = self.read == "forward" or asked.get(self.read, False)
        return super().forward(x * (1 + self.threshold) if reads else x)


def by_threshold(model):
    return lambda outputs, labels: nn.functional.cross_entropy(
        outputs * (1 + model.threshold), labels
    )


@pytest.mark.parametrize(
    ("read", "loss"),
    [
        ("forward", None),
        ("buffer", None),
        ("if large", None),
        ("if in a range", None),
        ("if both are", None),
        ("", by_threshold),
    ],
)
def test_a_buffer_that_evaluations_set_and_training_reads_is_refused(read, loss) -> None:
    told = r"training depends on buffer '(threshold|other)', to which evaluations write"
    with pytest.raises(ConfigurationError, match=told):
        start(made(lambda: TrainsByIt(read), loss)(), zoo.singly(VECTORS))


def test_a_buffer_that_evaluations_set_and_training_does_not_read_is_no_harm() -> None:
    assert_equal_to_plain(made(lambda: TrainsByIt("")), two_sub_epochs(), "modules")


class Quantized(nn.Module):
    """Simulates numbers of 8 bits, whose range observers tell."""

    def __init__(self, scheme: torch.qscheme, switched: bool) -> None:
        super().__init__()
        self.net = zoo.mlp(dropout=0.0).train()
        observer = (
            q.MovingAverageMinMaxObserver
            if scheme is torch.per_tensor_symmetric
            else q.MovingAveragePerChannelMinMaxObserver
        )
        weights = q.FakeQuantize.with_args(
            observer=observer, quant_min=-128, quant_max=127, dtype=torch.qint8, qscheme=scheme
        )
        self.net.qconfig = q.QConfig(activation=q.default_fake_quant, weight=weights)
        q.prepare_qat(self.net, inplace=True)
        self.switched = switched

    def forward(self, x):
        if self.switched:
            self.apply(q.enable_observer if self.training else q.disable_observer)
        return self.net(x)


def greatest(seen: torch.Tensor, x: torch.Tensor) -> None:
    seen.copy_(torch.maximum(seen, x.amax()))  # the rows of the first steps again change nothing


REFUSED: dict[str, tuple[Make, str]] = {
    **{
        f"{what}, {shards}": (made(model, shards=shards), f"buffer {name!r} in evaluation.*only$")
        for shards in (1, 2)
        for what, name, model in [
            ("a count", "n", writing("n", torch.tensor(0), lambda n, x: n.add_(len(x)))),
            ("by data", "n", writing("n", torch.tensor(0), lambda n, x: n.data.add_(1))),
            ("a greatest value", "top", writing("top", torch.tensor(0.0), greatest)),
            (
                "whether it was seen", "any",
                writing("any", torch.tensor(False), lambda a, x: a.fill_(a or len(x) > 6)),
            ),
            (
                "the longest", "long",
                writing("long", torch.tensor(0), lambda n, x: n.fill_(max(n.item(), len(x)))),
            ),
            (
                "the shortest", "short",
                writing("short", torch.tensor(99), lambda n, x: n.fill_(min(n.item(), len(x)))),
            ),
            ("another tensor", "b.rows", InEvaluationAlone),
            ("the last batch", "last", ReadsItsLastBatch),
        ]
    },
    "an average": (made(InEvaluationAlone, ema=0.9), "buffer 'b.rows' in evaluation"),
    "observers": (
        mlp_recipe(model=lambda: Quantized(torch.per_tensor_symmetric, switched=False)),
        r"min_val' in evaluation.* begin with self\.apply\(enable_observer if self\.training else",
    ),
    "observers that make their buffers": (
        mlp_recipe(model=lambda: Quantized(torch.per_channel_symmetric, switched=True)),
        r"scale' has shape \(1,\) before training and \(16,\) after .*register it with that shape",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_a_buffer_that_evaluation_writes_to_is_refused_by_name(what: str) -> None:
    make, message = REFUSED[what]
    with pytest.raises(ConfigurationError, match=message):
        start(make(), zoo.singly(VECTORS))


def test_observers_that_are_off_in_evaluation_train_as_plainly() -> None:
    make = mlp_recipe(
        model=lambda: Quantized(torch.per_tensor_symmetric, switched=True),
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        shards=1,
    )
    trial = assert_equal_to_plain(make, two_sub_epochs(), "modules")
    assert trial.tensors()["buffer:net.0.weight_fake_quant.scale"] != 1


def test_a_buffer_that_is_set_to_the_same_anew_is_no_write() -> None:
    constant = writing("table", torch.zeros(3), lambda t, x: t.copy_(torch.arange(3.0)))
    trial = assert_equal_to_plain(made(constant), two_sub_epochs(), "modules")
    assert trial.cut_model.num_shards == 2
