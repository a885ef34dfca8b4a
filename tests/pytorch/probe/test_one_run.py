# te.memory_plan and te.explain leave nothing behind. Memory goes when the caller lets go of it, and buffers, random
# states, gradients, hooks and the caller's own graph are as before, errors included.
import contextlib
import gc
import sys
import weakref

import pytest
import torch
from fp8_steps import all_scales, assert_same_tensors, grads_of
from support import assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling

PROBES = [te.memory_plan, te.explain]


class Stop(Exception):
    pass


class Stage(torch.nn.Module):
    """A GEMM, and state that a call changes: a running sum in place, a replaced count, random numbers."""

    def __init__(self, tracker=None, fails=False):
        super().__init__()
        self.inner = te.Linear(8, 8, device="cpu")
        self.norm = torch.nn.BatchNorm1d(8)
        self.register_buffer("total", torch.ones(16).view(2, 8)[1:].expand(3, 8)[:1])
        self.register_buffer("count", torch.zeros(1))
        self.register_buffer("nothing", None)
        self.view = self.total[0]
        self.tracker, self.fails = tracker, fails

    def get_rng_state_tracker(self):
        return self.tracker

    def forward(self, x):
        self.total.mul_(2)
        self.count = self.count + 1
        self.register_buffer("late", torch.ones(2))
        y = self.norm(self.inner(x)) * self.total * torch.rand(1)
        with self.tracker.fork() if self.tracker is not None else torch.enable_grad():
            y = y * torch.rand(1)
        if self.fails:
            raise Stop
        return y


@pytest.mark.parametrize("probe", PROBES)
@pytest.mark.parametrize("fails", [False, True])
def test_nothing_lives_on(probe, fails):
    """Nodes are C++ objects that the garbage collector cannot traverse: a cycle through them is never freed."""
    module = torch.nn.Sequential(te.LayerNormMLP(8, 16, device="cpu"), Stage(fails=fails))
    x = randn(5, 8, requires_grad=True)
    alive = weakref.ref(module), weakref.ref(x), weakref.ref(module[0].fc1_weight)
    try:
        probe(module, x)
    except Stop:
        assert fails
    del module, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 3


def test_saved_tensors_of_the_tests_leave_nothing_either():
    module, x = te.LayerNormMLP(8, 16, device="cpu"), randn(5, 8, requires_grad=True)
    alive = weakref.ref(module.fc1_weight), weakref.ref(x)
    with saved_tensors() as kept:
        module(x)
    assert kept
    del module, x, kept
    gc.collect()
    assert [ref() for ref in alive] == [None] * 2


@pytest.fixture
def keeps_mib(request, monkeypatch):
    """The benchmarks' function. Modules of their names are left to others."""
    monkeypatch.syspath_prepend(str(request.config.rootpath / "benchmarks"))
    yield pytest.importorskip("common").keeps_mib
    for name in ("common", "nvml", "rows", "timing"):
        sys.modules.pop(name, None)


def test_keeps_mib_of_the_benchmarks_leaves_nothing_either(keeps_mib):
    module, x = te.LayerNormMLP(8, 16, device="cpu"), randn(5, 8, requires_grad=True)
    plan = te.memory_plan(module, x)
    assert keeps_mib(module, x) * 2**20 == plan.kept_bytes
    alive = weakref.ref(module.fc1_weight), weakref.ref(x)
    del module, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 2


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("probe", PROBES)
def test_buffers_and_random_states_are_as_before(probe, fails):
    tracker, other = te.CudaRNGStatesTracker(), te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 7)
    other.add("another", 8)
    module, x = Stage(tracker, fails), randn(5, 8, requires_grad=True)
    before = {name: (buffer, buffer.clone(), buffer._version) for name, buffer in module.named_buffers()}
    states = torch.get_rng_state(), tracker.get_states(), other.get_states()
    try:
        probe(module, x)
    except Stop:
        assert fails
    after = dict(module.named_buffers())
    assert list(after) == list(before) and "late" not in module._buffers
    for name, (buffer, bits, version) in before.items():
        assert after[name] is buffer and buffer._version == version
        assert_same_bits(buffer.reshape(-1), bits.reshape(-1), name)
    assert module.view.eq(1).all() and module.view.data_ptr() == module.total.data_ptr()
    assert_same_bits(torch.get_rng_state(), states[0])
    assert_same_bits(tracker.get_states()["model-parallel-rng"], states[1]["model-parallel-rng"])
    assert_same_bits(other.get_states()["another"], states[2]["another"])


class OwnTracker:
    """A tracker of the user, with the four methods that modules call."""

    def __init__(self):
        self.generator = torch.Generator().manual_seed(1)

    def get_states(self):
        return {"own": self.generator.get_state()}

    def set_states(self, states):
        self.generator.set_state(states["own"])

    @contextlib.contextmanager
    def fork(self, name="own"):
        before = torch.get_rng_state()
        torch.set_rng_state(self.generator.get_state())
        try:
            yield
        finally:
            self.generator.set_state(torch.get_rng_state())
            torch.set_rng_state(before)


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("probe", PROBES)
def test_a_tracker_of_the_callers_own_is_as_before(probe, fails):
    tracker = OwnTracker()
    attention = te.DotProductAttention(2, 4, attention_dropout=0.5, get_rng_state_tracker=lambda: tracker)
    before = tracker.get_states()["own"]
    q = randn(4, 1, 2, 4, requires_grad=True)
    attention(q, q, q)
    assert not torch.equal(tracker.get_states()["own"], before)  # numbers are drawn from it
    before = tracker.get_states()["own"]
    probe(attention, q, q, q)
    assert_same_bits(tracker.get_states()["own"], before)
    module, x = Stage(tracker, fails), randn(5, 8, requires_grad=True)
    try:
        probe(module, x)
    except Stop:
        assert fails
    assert_same_bits(tracker.get_states()["own"], before)


@pytest.mark.parametrize("probe", PROBES)
def test_a_graph_made_before_still_has_its_backward(probe):
    """Its graph saves the buffer `total`, which the probing run writes; and it produces the sample of the probe."""
    module, x = Stage(), randn(5, 8, requires_grad=True)
    module.norm.eval()
    y = module(x)
    probe(module, y)
    y.sum().backward()
    assert x.grad is not None


class Checkpointed(torch.nn.Module):
    def __init__(self, checkpoint, **options):
        super().__init__()
        self.inner, self.scale = te.LayerNormMLP(8, 16, device="cpu"), torch.nn.Parameter(torch.ones(8))
        self.checkpoint, self.options, self.fails = checkpoint, options, False

    def forward(self, x):
        y = self.checkpoint(self.inner, x, **self.options) * self.scale
        if self.fails:
            y.register_hook(self.stop)
        return y

    def stop(self, grad):
        raise Stop


REENTRANT = [(te.checkpoint, {}), (torch.utils.checkpoint.checkpoint, {"use_reentrant": True})]


@pytest.mark.parametrize(("checkpoint", "options"), REENTRANT)
@pytest.mark.parametrize("fails", [False, True])
def test_a_reentrant_checkpoint_is_explained_and_gradients_stay(checkpoint, options, fails):
    module, leaf = Checkpointed(checkpoint, **options), randn(5, 8, requires_grad=True)
    module.fails, ran = fails, []
    grads = {}
    for i, p in enumerate([leaf, *module.parameters()]):
        grads[p] = p.grad = None if i % 2 else torch.full_like(p, float(i))
        p.register_hook(ran.append)
        p.register_post_accumulate_grad_hook(ran.append)
    hooks = [(dict(p._backward_hooks), dict(p._post_accumulate_grad_hooks)) for p in grads]
    x = leaf * 2
    try:
        rows = te.explain(module, x).rows
    except Stop:
        assert fails
    else:
        found = {(row.op, row.calls) for row in rows}
        assert {("linear_fwd", 4), ("linear_wgrad", 2), ("linear_dgrad", 2), ("normalization_bwd", 1)} <= found
        assert {row.module for row in rows} == {"inner"}
    assert not ran
    for i, (p, grad) in enumerate(grads.items()):
        assert p.grad is grad and (grad is None or grad.eq(float(i)).all())
    assert hooks == [(dict(p._backward_hooks), dict(p._post_accumulate_grad_hooks)) for p in grads]
    module.fails = False
    module(x).sum().backward()  # the caller's graph is intact, and the hooks run again
    assert len(ran) == 2 * len(grads)


def test_hooks_do_not_run_without_a_checkpoint_either():
    module, x, ran = te.Linear(8, 8, device="cpu"), randn(5, 8, requires_grad=True), []
    for p in (x, *module.parameters()):
        p.register_hook(ran.append)
    te.explain(module, x)
    assert not ran


def test_one_tensor_given_twice_is_one_inside():
    class Same(torch.nn.Module):
        def forward(self, a, b):
            assert a is b["again"][0]
            return a * 2

    x = randn(3, requires_grad=True)
    te.explain(Same(), x, {"again": [x]})


@pytest.mark.parametrize("probe", PROBES)
def test_a_compiled_part_is_refused_by_name(probe):
    compiled = torch.compile(te.Linear(4, 4, device="cpu"), backend="eager")
    with refused(TypeError, probe.__name__, "'module'", "Sequential", "submodule '1'", "compiled", "torch.compile"):
        probe(torch.nn.Sequential(torch.nn.ReLU(), compiled), torch.zeros(2, 4))
    inside = torch.nn.Sequential(torch.nn.ReLU(), te.Linear(4, 4, device="cpu"))
    inside[1].compile(backend="eager")
    with refused(TypeError, probe.__name__, "submodule '1'", "compiled"):
        probe(inside, torch.zeros(2, 4))
    with refused(TypeError, probe.__name__, "Linear", "not compiled"):
        probe(inside[1], torch.zeros(2, 4))


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("primary", [False, True])
@pytest.mark.parametrize("probe", PROBES)
def test_training_under_delayed_scaling_is_as_without_probes(probe, primary, fails):
    """Before the call of the modules in an autocast, after it, and without one; also with another history length."""
    recipe, shorter = DelayedScaling(amax_history_len=4), DelayedScaling(amax_history_len=2, margin=1)

    class Model(torch.nn.Sequential):
        fails = False

        def forward(self, x, first=None):
            x = self[1](self[0](x, is_first_microbatch=first), is_first_microbatch=first)
            if self.fails:
                raise Stop
            return x

    def probed(model, x, first):
        model.fails = fails
        with pytest.raises(Stop) if fails else contextlib.nullcontext():
            probe(model, x * 100, first)
        model.fails = False

    def train(probing):
        torch.manual_seed(3)
        with te.quantized_model_init(enabled=primary, recipe=recipe):
            model = Model(te.LayerNormLinear(16, 16, device="cpu"), te.LayerNormMLP(16, 32, device="cpu"))
        outputs = []
        for i in range(4):
            x, first = randn(8, 16), i % 2 == 0
            with te.autocast(recipe=recipe):
                if probing:
                    probed(model, x, True)
                outputs.append(y := model(x, first))
                if probing:
                    probed(model, x, None)
            if probing:
                with te.autocast(recipe=shorter):
                    probed(model, x, first)
            y.sum().backward()
        return outputs, all_scales(model), grads_of(model)

    (found, *kept), (wanted, *own) = train(True), train(False)
    for a, b in zip(found, wanted, strict=True):
        assert_same_bits(a, b)
    for a, b in zip(kept, own, strict=True):
        assert_same_tensors(a, b)


@pytest.mark.parametrize("probe", [te.explain, te.memory_plan])
def test_what_is_run_without_a_sample(device, probe):
    class Given(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = te.Linear(16, 16, device=device)

    class Nothing(Given):
        def forward(self):
            return self.inner(torch.ones(4, 16, device=device))

    class Named(Given):
        def forward(self, *, x):
            return self.inner(x)

    class Something(Given):
        def forward(self, x):
            return self.inner(x)

    class Passes(te.Linear):
        def forward(self, *args, **options):
            return super().forward(*args, **options)

    made = [te.Linear(16, 16, device=device), te.LayerNormMLP(16, 32, device=device), Passes(16, 16, device=device)]
    for module in (*made, Nothing()):
        assert probe(module).rows
    assert probe(Named(), x=torch.ones(4, 16, device=device)).rows
    assert probe(Something(), x=torch.ones(4, 16, device=device)).rows
    with refused(TypeError, probe.__name__, "Something", "(module, *sample)"):
        probe(Something())
