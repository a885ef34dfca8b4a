# Two threads in one process, each with a model, a recipe, an optimizer, captures, a stash and checkpoints of its own:
# each has the bits of a run alone, and an exception in one leaves the other as it is. The long run is marked slow.
# Mutants: saved_observers() or a recording (active() in probe.cpp) of all threads turns these red.
import contextlib
import copy
import gc
import subprocess
import sys
import threading
import zlib

import pytest
import torch
from support import in_threads, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch import saved as door
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.stash import PagedStash

from ..graph.cases import event_on

pytestmark = [pytest.mark.usefixtures("fp8_left_off"), pytest.mark.filterwarnings("ignore")]
HIDDEN, ROWS = 32, 16
RECIPES = {
    "delayed": lambda: DelayedScaling(amax_history_len=4),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
    "none": None,
}
PAIRS = [("delayed", "delayed"), ("delayed", "current"), ("none", "block"), ("current", "none")]


@pytest.fixture(autouse=True)
def hasty():
    """Threads take turns as often as they can, without garbage of other tests to collect."""
    gc.collect()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(interval)


def block(device):
    return te.LayerNormMLP(HIDDEN, HIDDEN, device=device)


def model_on(device):
    return torch.nn.ModuleList(block(device) for _ in range(4))


class Trainer:
    """Trains a model whose layers are captured, stashed, recomputed and plain. `every`: steps from capture to capture.
    done: of each step the loss and a checksum of what it leaves."""

    def __init__(self, model, name, xs, every=25):
        self.model, self.xs, self.every = model, xs, every
        self.recipe = None if RECIPES[name] is None else RECIPES[name]()
        self.optimizer = te.optimizers.FusedAdam(model.parameters(), lr=1e-2)
        self.device, self.captured, self.done = xs[0].device, None, []

    def around(self):
        return contextlib.nullcontext() if self.recipe is None else te.autocast(recipe=self.recipe)

    def capture(self):
        if self.captured is not None:
            self.captured.reset()
        sample = (torch.zeros(ROWS, HIDDEN, device=self.device, requires_grad=True),)
        enabled = self.recipe is not None
        self.captured = te.make_graphed_callables(self.model[0], sample, enabled=enabled, recipe=self.recipe)

    def forward(self, x, stash):
        _, stashed, recomputed, plain = self.model
        with self.around():
            y = self.captured(x)
            with stash.group("stashed", torch.tensor([ROWS], device=self.device)):
                y = stashed(y)
            return plain(te.checkpoint(recomputed, y))

    def step(self, x, stash):
        self.optimizer.zero_grad()
        loss = self.forward(x, stash).square().mean()
        loss.backward()
        self.optimizer.step()
        left = torch.cat([t.detach().flatten() for p in self.model.parameters() for t in (p, p.grad)])
        self.done.append((loss.item(), zlib.crc32(left.cpu().numpy().tobytes())))
        stash.reset()

    def run(self, steps):
        stash = PagedStash(page_bytes=512, device=self.device, device_pages=300)
        for i in range(steps):
            if i % self.every == 0:
                self.capture()
            self.step(self.xs[i % len(self.xs)].clone().requires_grad_(), stash)
        stash.close()
        self.captured.reset()
        return self.done


def made(device, names):
    """Of each name a trainer alone, and one like it."""
    found = []
    for name in names:
        model, xs = model_on(device), [randn(ROWS, HIDDEN, device=device) for _ in range(7)]
        found.append((Trainer(model, name, xs), Trainer(copy.deepcopy(model), name, xs)))
    return found


def nothing_is_on():
    assert Manager.get_fp8_autocast_state() == (False, False, None, None, False)
    assert not is_graph_capturing() and not Manager.with_fp8_parameters()


def check_bits(device, names, steps):
    trainers = made(device, names)
    alone = [one.run(steps) for one, _ in trainers]
    beside = in_threads(len(trainers), lambda i: trainers[i][1].run(steps))
    for name, got, wanted in zip(names, beside, alone, strict=True):
        differ = [i for i, (a, b) in enumerate(zip(got, wanted, strict=True)) if a != b]
        assert not differ, f"{name} of {names}: {len(differ)} of {steps} steps differ, first {differ[0]}"
    nothing_is_on()


@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_threads_train_as_each_alone(device, names):
    check_bits(device, names, 51)


@pytest.mark.slow
@pytest.mark.parametrize("names", PAIRS, ids=" and ".join)
def test_two_threads_train_as_each_alone_for_long(device, names):
    check_bits(device, names, 1000)


class Fails(torch.nn.Module):
    """In its forward, or in its backward."""

    def __init__(self, inner, backward):
        super().__init__()
        self.inner, self.backward = inner, backward

    def forward(self, x):
        y = self.inner(x)
        if not self.backward:
            raise ZeroDivisionError("of a forward")
        if y.requires_grad:  # not in the first run of a checkpoint
            y.register_hook(self._raise)
        return y

    @staticmethod
    def _raise(gradient):
        raise ZeroDivisionError("of a backward")


def fail(device, recipe):
    """Each of them in the middle of something that is a thread's own."""
    x = randn(ROWS, HIDDEN, device=device, requires_grad=True)
    for backward in (False, True):
        module = Fails(block(device), backward)
        with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe()):
            module(x).sum().backward()
        with pytest.raises(ZeroDivisionError):
            te.make_graphed_callables(module, (x.detach().requires_grad_(),), enabled=True, recipe=recipe())
        with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe()):
            te.checkpoint(module, x).sum().backward()
    module = Fails(block(device), False)
    with contextlib.closing(PagedStash(page_bytes=512, device=device, device_pages=300)) as stash:
        group = stash.group(0, torch.tensor([ROWS], device=device))
        with pytest.raises(ZeroDivisionError), te.autocast(recipe=recipe()), group:
            module(x)
    with pytest.raises(ZeroDivisionError):
        te.memory_plan(module, x)
    with pytest.raises(ZeroDivisionError), te.quantized_model_init(recipe=recipe()):
        block(device)
        raise ZeroDivisionError
    nothing_is_on()


@pytest.mark.parametrize("name", ["delayed", "none"])
def test_exceptions_in_one_leave_the_other(device, name):
    ((alone, beside),) = made(device, [name])
    wanted, failed, over = alone.run(40), [], threading.Event()

    def run(i):
        if i == 0:
            try:
                return beside.run(40)
            finally:
                over.set()
        while not over.is_set():
            fail(device, Float8CurrentScaling)
            failed.append(None)
        return None

    assert in_threads(2, run)[0] == wanted and failed
    nothing_is_on()


def test_plans_of_one_thread_are_not_of_another(device):
    """Tensors that another thread saves meanwhile are no rows of te.memory_plan or te.explain."""
    module, x = block(device), randn(ROWS, HIDDEN, device=device)
    ((_, beside),) = made(device, ["current"])
    plan, paths = str(te.memory_plan(module, x)), str(te.explain(module, x))
    over = threading.Event()

    def run(i):
        if i == 0:
            try:
                return beside.run(30)
            finally:
                over.set()
        told = set()
        while not over.is_set():
            told.add((str(te.memory_plan(module, x)), str(te.explain(module, x))))
        return told

    assert in_threads(2, run)[1] == {(plan, paths)}


def test_observers_come_and_go_during_a_call(device):
    """One leaves, and another one comes, when the first tensor is saved; each is called for tensors saved inside of
    it."""
    heard = []

    class Toy(door.StorageHandler):
        def take(self, tensor):
            return None

    def first(tensor, saved):
        heard.append("first")
        if len(heard) == 1:
            contexts[0].__exit__(None, None, None)
            contexts[2].__enter__()

    def named(name):
        return lambda tensor, saved: heard.append(name)

    contexts = [door.observed(call) for call in (first, named("second"), named("third"))]
    x = randn(4, 4, device=device, requires_grad=True)
    contexts[0].__enter__()
    with contexts[1], door.Hooks(Toy()):
        y = x.sin().cos()
        in_threads(1, lambda _: x.sin())
    contexts[2].__exit__(None, None, None)
    with door.Hooks(Toy()):
        y.sin()
    assert heard == ["first", "second", "second", "third"]


class Waits(torch.nn.Module):
    """Its forward stands still until others have gone on, then records an event."""

    def __init__(self, device, go_on):
        super().__init__()
        self.inner, self.event, self.go_on = block(device), event_on(device), go_on

    def forward(self, x):
        assert is_graph_capturing()
        self.go_on()
        y = self.inner(x)
        self.event.record()
        return y


def test_a_capture_within_a_capture_of_another_thread():
    """On a CPU, where none waits for another: what is noted of one is its own."""
    inside, x, found = [], randn(ROWS, HIDDEN, requires_grad=True), []

    def other():
        module = Waits("cpu", lambda: None)
        capture(module)
        inside.append(module(x).shape)

    def capture(module):
        sample = (torch.zeros(ROWS, HIDDEN, requires_grad=True),)
        te.make_graphed_callables(module, sample, enabled=True, recipe=Float8CurrentScaling())

    def elsewhere():
        found.append(in_threads(1, lambda _: other()))

    module = Waits("cpu", elsewhere)
    capture(module)
    assert inside and len(inside) == len(found) and not is_graph_capturing()
    assert list(module.forward.record.forward_graph.events) == [module.event]


def test_captures_of_many_threads_see_one_another():
    """Each looks up whose static inputs its own may be, while others come and go."""

    def run(_):
        for _ in range(30):
            module = torch.nn.Linear(4, 4)
            te.make_graphed_callables(module, (torch.zeros(2, 4, requires_grad=True),), num_warmup_iters=0)
        return True

    assert all(in_threads(4, run))


# torch.get_rng_state() makes its tensor under the generator's mutex, where Python 3.10 and 3.11 may collect garbage,
# whose callbacks may hand the GIL to a thread that waits for that mutex.
RANDOM_STATES = """
import gc, threading, time
import torch
import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed.rng import Snapshot

tracker = te.distributed.CudaRNGStatesTracker()
tracker.add("drawn", 5)
done = []

def work():
    for _ in range(300):
        with Snapshot((), tracker).replayed():
            torch.rand(2)
    done.append(1)

gc.callbacks.append(lambda phase, info: time.sleep(1e-4))  # hypothesis, profilers and finalizers do the like
gc.set_threshold(2)
threads = [threading.Thread(target=work) for _ in range(2)]
[t.start() for t in threads]
[t.join() for t in threads]
assert len(done) == 2
"""


def test_threads_that_note_random_states_do_not_lock_each_other_out():
    subprocess.run([sys.executable, "-c", RANDOM_STATES], check=True, timeout=120)
