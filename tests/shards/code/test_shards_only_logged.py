"""What code keeps only for a log is told apart from what may change training."""

from __future__ import annotations

import logging
import sys
import textwrap

import pytest

from cerebro_hydra.shards.code.only_logged import SourceFile, only_logged

TAKEN = {"training", "p"}


def logged(*sources: str) -> set[str]:
    names = ("m", "n")
    variables = {"logging": logging, "sys": sys}
    files = [
        SourceFile.of(name, textwrap.dedent(source), variables)
        for name, source in zip(names, sources, strict=False)
    ]
    return set(only_logged(files, TAKEN))


def method(body: str, first: str = "self.kept = 0", beside: str = "") -> str:
    """Return a module whose forward has a body."""
    return "\n".join(
        (
            "class Layer(nn.Module):",
            "    def __init__(self, given=None):",
            "        self.fc = nn.Linear(2, 2)",
            f"        {first}",
            textwrap.indent(textwrap.dedent(beside), "    "),
            "    def forward(self, x):",
            textwrap.indent(textwrap.dedent(body), "        "),
            "        return self.fc(x)",
        )
    )


LOGGED = {
    "a count": "self.kept += len(x)",
    "a count that is shown": """
        self.kept += 1
        if self.kept % 100 == 0:
            log.info("%d calls", self.kept)
            print(f"{self.kept} calls")
    """,
    "a flag": """
        if not self.kept and x.max() > 3:
            warnings.warn("large")
            self.kept = True
    """,
    "a flag that is made late": """
        if not hasattr(self, "kept"):
            self.kept = True
            logging.info("first")
    """,
    "a mean": "self.kept = 0.9 * self.kept + 0.1 * x.mean().item()",
    "the best so far": "self.kept = min(self.kept, x.mean().item())",
    "what was last": "self.kept = x.detach()",
    "by way of a local variable": """
        count = self.kept + 1
        self.kept = count
        print(count)
    """,
    "what is set beside another": "self.kept, n = 1, 2",
    "a time": "self.kept = time.perf_counter()",
    "without gradients": "with torch.no_grad():\n    print(self.kept, file=sys.stderr)",
    "a progress bar": "bar.set_postfix(kept=self.kept)",
}


@pytest.mark.parametrize("what", LOGGED)
def test_what_is_set_and_shown_is_only_logged(what: str) -> None:
    assert ".kept" in logged(method(LOGGED[what]))


CONTAINERS = {
    "a list": ("[]", "self.kept.append(x.norm().item())"),
    "a list of tensors": ("[]", "self.kept.append(x.detach())"),
    "a Counter": ("collections.Counter()", "self.kept['rows'] += len(x)"),
    "a Counter that is updated": ("collections.Counter()", "self.kept.update(x.tolist())"),
    "lists": ("defaultdict(list)", "self.kept['a'].append(time.time())"),
    "a dict": ("{}", "self.kept['last'] = x.mean().item()"),
    "a flag": (
        "{'warned': False}",
        "if not self.kept['warned'] and (x.argmax(1) == 1).float().mean() > 0.5:\n"
        "    self.kept['warned'] = True\n"
        "    log.warning('many')",
    ),
    "a tensor": ("torch.zeros(2)", "self.kept += x.sum(0)"),
    "numbers": ("itertools.count()", "log.info('%d', next(self.kept))"),
}


@pytest.mark.parametrize("what", CONTAINERS)
def test_so_is_what_containers_gather(what: str) -> None:
    first, body = CONTAINERS[what]
    assert ".kept" in logged(method(body, f"self.kept = {first}"))


USED: dict[str, tuple[str, ...]] = {
    "computes": ("y = x * self.kept\nx = y",),
    "is an argument": ("x = self.fc(x, self.kept)",),
    "is an argument of what is logged": ("print(self.fc(self.kept))",),
    "chooses a value": ("x = x if self.kept else 2 * x",),
    "chooses what is set": ("self.kept += 1\nif self.kept == 7:\n    x = 2 * x",),
    "chooses what is set by what is set": (
        "self.kept += 1\nn = self.kept == 7\nif n:\n    x = 2 * x",
    ),
    "chooses what is changed": ("if self.kept == 7:\n    self.fc.weight.mul_(2)",),
    "chooses what is changed in a with": (
        "with torch.no_grad():\n    if self.kept == 7:\n        self.fc.weight.mul_(2)",
    ),
    "chooses what is assigned to another": ("if self.kept == 7:\n    self.fc.weight.data = x",),
    "chooses what a log is told": ("if self.kept == 7:\n    log.info(self.fc.weight.mul_(2))",),
    "chooses by a short circuit": (
        "if not self.kept and self.fc(x).sum():\n    self.kept = True",
    ),
    "chooses by an operator": ("self.kept and self.fc.reset_parameters()",),
    "chooses what torch knows": ("if self.kept == 7:\n    self.training = False",),
    "chooses what is deleted": ("if self.kept == 7:\n    del self.fc",),
    "chooses the end": ("if self.kept == 7:\n    return x",),
    "chooses an error": ("if self.kept == 7:\n    raise ValueError",),
    "chooses what comes next": ("if self.kept == 7:\n    print(next(self.rows))",),
    "chooses what is lent": ("w = self.fc.weight\nif self.kept == 7:\n    w[0] = 1",),
    "chooses what is scaled": ("w = self.fc.weight\nif self.kept == 7:\n    w *= 2",),
    "is asserted": ("assert self.kept < 7",),
    "counts rounds": ("for _ in range(self.kept):\n    x = x + 1",),
    "counts rounds of a while": ("while self.kept < 3:\n    self.kept += 1",),
    "is an index": ("x = x[self.kept]",),
    "is where a value goes": ("x[self.kept] = 1",),
    "is given a name": ("if (n := self.kept) == 7:\n    x = x + n",),
    "is in a comprehension": ("x = [x for _ in range(self.kept)]",),
    "is set beside another": ("self.kept, *x = x",),
    "is looked up": ("x = x * vars(self)['kept']",),
    "is looked up by any name": ("name = 'ke' + 'pt'\nx = x * getattr(self, name)",),
    "is asked for": ("x = x * getattr(self, 'kept', 1)",),
    "is evaluated": ("x = x * eval('self.kept')",),
    "is called": ("self.kept = self.fc\nx = self.kept(x)",),
    "is another name of a weight": ("self.kept *= 2", "self.kept = self.fc.weight.data"),
    "is another name of an argument": ("self.kept['a'] += 1", "self.kept = given"),
    "is made another name": (
        "if self.kept == 7:\n    self.kept *= 2", "self.kept = 0",
        "def lend(self):\n    setattr(self, 'kept', self.fc.weight.data)",
    ),
    "chooses by a comparison": ("print(0 < self.kept < self.fc(x).sum())",),
    "chooses by an error": (
        "try:\n    log.info('%f', 1 / (7 - self.kept))\nexcept ZeroDivisionError:\n    x = 2 * x",
    ),
    "chooses by an error that is suppressed": (
        "with suppress(Exception):\n    print(1 / (7 - self.kept))\n    x = 2 * x",
    ),
    "is printed to what does more": ("print(self.kept, file=self.out)",),
    "is added to what does more": (
        "self.held.add(self.kept)", "self.kept = 0; self.held = Held()",
        "def add(self, n):\n    self.fc.weight.mul_(n)",
    ),
    "is changed by an operator of one's own": (
        "self.kept += 1", "self.kept = 0", "def __iadd__(self, n):\n    return self.fc(n)"
    ),
    "holds a weight": ("self.kept[0][0] = 2", "self.kept = [self.fc.weight]"),
    "gets a weight": ("self.kept.append(self.fc.weight)\nself.kept[0] *= 2", "self.kept = []"),
    "is returned": ("x", "self.kept = 0", "def seen(self):\n    return self.kept"),
    "is logged by a function that does more": (
        "if self.kept == 7:\n    self.note()", "self.kept = 0",
        "def note(self):\n    self.fc.weight.mul_(2)",
    ),
    "is logged by a method of one's own": (
        "self.info(self.kept)", "self.kept = 0", "def info(self, n):\n    self.fc.weight.mul_(n)"
    ),
    "chooses a property": (
        "if self.kept == 7:\n    print(self.more)", "self.kept = 0",
        "@property\ndef more(self):\n    return self.fc.weight.mul_(2)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", USED)
def test_what_may_change_training_is_not_only_logged(what: str) -> None:
    assert ".kept" not in logged(method(*USED[what]))


def test_what_other_code_reads_by_that_name_is_not_only_logged() -> None:
    own = method("self.kept += 1")
    assert ".kept" in logged(own)
    assert ".kept" not in logged(own, "def loss(outputs):\n    return outputs * MODEL.kept")
    assert ".kept" not in logged(own + "\n@dataclass\nclass Other:\n    kept: int = 0\n")


def test_what_torch_knows_by_that_name_is_not_only_logged() -> None:
    assert ".p" not in logged(method("self.p += 1", "self.p = 0.1"))


GLOBAL = """
    SEEN = False
    def collate(batch, training):
        global SEEN
        if not SEEN and batch.max() > 3:
            SEEN = True
            print("large")
        return batch
"""
CLOSURE = """
    def make():
        rows, names = 0, ["a"]
        seen = {}
        def collate(batch):
            nonlocal rows
            rows = rows + len(batch)
            seen["rows"] = len(batch)
            return batch * len(names)
        return collate
"""


def test_global_variables_are_only_logged_unless_another_module_takes_them() -> None:
    assert "m:SEEN" in logged(GLOBAL)
    assert "m:SEEN" not in logged(GLOBAL, "from m import SEEN")
    assert "m:SEEN" not in logged(GLOBAL, "import m\nx = m.SEEN + 1")
    assert "m:SEEN" not in logged(GLOBAL + "\n    def loss(x):\n        return x * SEEN\n")
    assert "m:SEEN" in logged(
        GLOBAL + "\n    def loss(x):\n        SEEN = x\n        return SEEN\n"
    )


def test_variables_of_closures_are_told_by_the_function_that_has_them() -> None:
    found = logged(CLOSURE)
    assert "m:make.<locals>.collate:seen" in found
    assert "m:make.<locals>.collate:names" not in found


def test_functions_that_do_nothing_but_log_may_be_chosen() -> None:
    source = """
        @functools.lru_cache(None)
        def note(message):
            log.warning(message)
        @functools.lru_cache(None)
        def scale():
            WEIGHT.mul_(2)
        @functools.lru_cache(None)
        def twice(x):
            return 2 * x
    """
    found = logged(source)
    assert "m:note()" in found
    assert not {"m:scale()", "m:twice()"} & found
    chosen = method("self.kept += 1\nif self.kept == 7:\n    note('seven')")
    assert ".kept" in logged(chosen, source)
    assert ".kept" not in logged(chosen.replace("note('seven')", "scale()"), source)


@pytest.mark.parametrize("sink", ["print", "info"])
def test_a_log_of_ones_own_is_no_log(sink: str) -> None:
    call = "print(self.kept)" if sink == "print" else "log.info(self.kept)"
    own = f"def {sink}(n):\n    WEIGHT.mul_(n)"
    assert ".kept" in logged(method(call))
    assert ".kept" not in logged(method(call), own)
