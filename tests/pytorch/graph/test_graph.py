# make_graphed_callables: captured equals eager, bit for bit, in everything that a training step leaves. On a CPU a
# recorder replaces the graphs, on CUDA they are real.
import copy
import pickle

import pytest
import torch
from support import DTYPES, assert_same_bits, refused, saved_tensors

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph import is_graph_capturing
from transformer_engine.pytorch.utils import make_weak_ref

from .cases import (
    FAMILIES,
    HIDDEN,
    TOKENS,
    assert_same_step,
    build,
    capture,
    layer,
    linear,
    mlp,
    plain,
    step,
    tokens,
    twins,
)

every_family = pytest.mark.parametrize("family", FAMILIES, ids=lambda f: f.__name__)


@every_family
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_captured_equals_eager(device, dtype, family):
    module, eager = twins(family, device, dtype)
    assert capture(module, device, dtype) is module
    for seed in range(3):  # gradients are set, then added to
        x = tokens(device, dtype)
        assert_same_step(step(module, x, seed), step(eager, x, seed), f"step {seed}")


@pytest.mark.parametrize("dtype", DTYPES)
def test_parameters_after_optimizer_steps(device, dtype):
    module, eager = twins(mlp, device, dtype)
    capture(module, device, dtype)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=0.05) for m in (module, eager)]
    for seed in range(4):
        x = tokens(device, dtype)
        for m, optimizer in zip((module, eager), optimizers):
            optimizer.zero_grad()
            step(m, x, seed)
            optimizer.step()
    for (name, p), twin in zip(module.named_parameters(), eager.parameters()):
        assert_same_bits(p, twin, name)


@pytest.mark.parametrize("to_none", [True, False])
def test_gradients_accumulate_over_replays(device, to_none):
    module, eager = twins(mlp, device)
    capture(module, device)
    for _ in range(2):
        for seed in (1, 2, 3):
            x = tokens(device)
            assert_same_step(step(module, x, seed), step(eager, x, seed))
        kept = [(p.grad, p.grad.clone()) for p in module.parameters()]
        for m in (module, eager):
            m.zero_grad(set_to_none=to_none)
        if to_none:  # gradients that the caller holds stay unchanged
            x = tokens(device)
            assert_same_step(step(module, x, 9), step(eager, x, 9))
            for own, copied in kept:
                assert_same_bits(own, copied)


def test_an_inputs_gradient_accumulates_and_is_the_callers(device):
    module, eager = twins(linear, device)
    capture(module, device)
    x = tokens(device, grad=True)
    twin = x.detach().clone().requires_grad_()
    for _ in range(2):
        module(x).square().sum().backward()
        eager(twin).square().sum().backward()
    assert_same_bits(x.grad, twin.grad)
    module(tokens(device, grad=True)).sum().backward()
    assert_same_bits(x.grad, twin.grad)


def test_a_stack_of_captured_layers(device):
    stack = torch.nn.Sequential(*(build(layer, device) for _ in range(3)))
    eager = copy.deepcopy(stack)
    sample = tokens(device, grad=True)
    te.make_graphed_callables(tuple(stack), tuple((sample,) for _ in stack))  # the same tensor for all of them
    for seed in range(3):
        x = tokens(device)
        assert_same_step(step(stack, x, seed), step(eager, x, seed))


def test_capture_changes_nothing(device):
    class Counting(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(plain, device)
            self.norm = torch.nn.BatchNorm1d(HIDDEN, device=device)

        def forward(self, x):
            assert is_graph_capturing()
            return self.norm(self.inner(x).flatten(0, 1))

    module, sample = Counting(), tokens(device, grad=True)
    for p in module.parameters():
        p.grad = torch.full_like(p, 3.0)
    state = {name: t.clone() for name, t in module.state_dict().items()}
    torch.manual_seed(11)
    wanted = torch.rand(3, device=device), torch.rand(3)
    torch.manual_seed(11)
    te.make_graphed_callables(module, (sample,))
    assert_same_bits(torch.rand(3, device=device), wanted[0])
    if device == "cuda":
        assert_same_bits(torch.rand(3), wanted[1])
    for name, t in module.state_dict().items():
        assert torch.equal(t, state[name]), name
    for p in module.parameters():
        assert p.grad.eq(3).all()
    assert not is_graph_capturing()


# ---- arguments ----


class Several(torch.nn.Module):
    """Tensors in a dict, constants beside them, integers, and results of every structure."""

    def __init__(self, device):
        super().__init__()
        self.linear = te.Linear(HIDDEN, HIDDEN, return_bias=True, device=device)

    def forward(self, x, *, pair, scale=1.0, mode="plain"):
        y, bias = self.linear(x * scale)
        picked = pair["table"][pair["index"]]
        if mode == "plain":
            return {"y": y + picked, "bias": bias, "index": pair["index"] * 2, "none": None, "mode": mode}
        return y


def several_arguments(device):
    return {
        "pair": {
            "table": torch.randn(5, HIDDEN, device=device).requires_grad_(),
            "index": torch.randint(5, TOKENS, device=device),
        },
        "scale": 0.5,
    }


def test_trees_of_arguments_and_results(device):
    module = Several(device)
    eager = copy.deepcopy(module)
    te.make_graphed_callables(module, (tokens(device, grad=True),), sample_kwargs=several_arguments(device))
    for _ in range(2):
        x, kwargs = tokens(device), several_arguments(device)
        left = []
        for m in (module, eager):
            own = {"pair": {k: t.detach().clone() for k, t in kwargs["pair"].items()}, "scale": 0.5}
            own["pair"]["table"].requires_grad_()
            inp = x.clone().requires_grad_()
            out = m(inp, **own)
            assert out["none"] is None and out["mode"] == "plain" and not out["index"].requires_grad
            (out["y"].square().sum() + out["bias"].sum() * 3).backward()
            left.append(
                [out["y"].detach(), out["index"], out["bias"].detach(), inp.grad, own["pair"]["table"].grad]
                + [p.grad for p in m.parameters()]
            )
        for got, want in zip(*left):
            assert_same_bits(got, want)


def test_a_function_and_inputs_without_gradients(device):
    weight = torch.randn(HIDDEN, device=device)

    def function(x, y):
        return x * weight, y + 1

    graphed = te.make_graphed_callables(function, (tokens(device, grad=True), tokens(device)))
    x, y = tokens(device, grad=True), tokens(device)
    a, b = graphed(x, y)
    assert a.requires_grad and not b.requires_grad
    a.sum().backward()
    assert_same_bits(b, y + 1)
    assert_same_bits(x.grad, weight.expand_as(x).contiguous())


def test_without_gradients(device):
    module, eager = twins(mlp, device)
    capture(module, device)
    x = tokens(device)
    with torch.no_grad():
        assert_same_bits(module(x), eager(x))
        assert not module(x).requires_grad
    frozen, twin = twins(mlp, device)
    with torch.no_grad():
        te.make_graphed_callables(frozen.eval(), (tokens(device),))
        assert_same_bits(frozen(x), twin(x))
        assert not frozen(x).requires_grad


def test_eval_mode_captures_a_backward_where_one_is_wanted(device):
    module, eager = twins(plain, device)
    capture(module.eval(), device)
    x = tokens(device)
    assert_same_step(step(module, x, 1), step(eager.eval(), x, 1))


def test_unused_inputs(device):
    graphed = te.make_graphed_callables(
        lambda x, y: x * 2, (tokens(device, grad=True), tokens(device, grad=True)), allow_unused_input=True
    )
    x, y = tokens(device, grad=True), tokens(device, grad=True)
    graphed(x, y).sum().backward()
    assert x.grad.eq(2).all() and y.grad is None


def test_an_unused_result(device):
    graphed = te.make_graphed_callables(lambda x: (x * 2, x * 3), (tokens(device, grad=True),))
    for which, factor in ((0, 2), (1, 3), (0, 2)):
        x = tokens(device, grad=True)
        graphed(x)[which].sum().backward()
        assert x.grad.eq(factor).all()


def test_under_autocast(device):
    module, eager = twins(linear, device)
    with torch.autocast(device, torch.bfloat16, cache_enabled=False):
        capture(module, device)
    x = tokens(device)
    got = step(module, x, 1)
    with torch.autocast(device, torch.bfloat16):
        want = step(eager, x, 1)
    assert got["y0"].dtype == torch.bfloat16
    assert_same_step(got, want)


def test_a_compiled_module(device):
    module, eager = twins(mlp, device)
    compiled = torch.compile(module, backend="aot_eager", fullgraph=True)
    capture(compiled, device)
    for seed in range(2):
        x = tokens(device)
        got, want = step(compiled, x, seed), step(eager, x, seed)
        assert_same_step({name.replace("_orig_mod.", ""): t for name, t in got.items()}, want)
    compiled.reset()
    assert "reset" not in vars(module)
    x = tokens(device)
    got, want = step(compiled, x, 3), step(eager, x, 3)
    assert_same_bits(got["y0"], want["y0"])


def test_hooks_registered_afterwards_run_around_each_replay(device):
    module = build(linear, device)
    capture(module, device)
    seen = []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    module.register_full_backward_hook(lambda *_: seen.append("backward"))
    module(tokens(device, grad=True)).sum().backward()
    assert seen == ["forward", "backward"]


@pytest.mark.gpu
def test_autograd_keeps_nothing():
    module = build(mlp, "cuda")
    capture(module, "cuda")
    with saved_tensors() as kept:
        module(tokens("cuda", grad=True))
    assert not kept


def test_a_thousand_replays(device):
    module, eager = twins(mlp, device)
    capture(module, device)
    for i in range(1000):
        x = tokens(device)
        if i == 10 and device == "cuda":
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        for m in (module, eager):
            m.zero_grad()
        if i % 100 == 0:
            assert_same_step(step(module, x, i), step(eager, x, i), f"replay {i}")
        else:
            step(module, x, i)
    if device == "cuda":
        for m in (module, eager):
            m.zero_grad()
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() <= before


# ---- copies, and references without memory ----


def test_copies_are_refused_until_reset(device):
    module, eager = twins(linear, device)
    capture(module, device)
    for way in (copy.deepcopy, pickle.dumps):
        with refused(RuntimeError, "Linear", "reset()"):
            way(module)
    module.reset()
    x = tokens(device)
    assert_same_bits(copy.deepcopy(module)(x), eager(x))


def test_weak_references(device):
    t = torch.arange(12.0, device=device).view(3, 4).t()[1:]
    weak = make_weak_ref({"pair": (t, [t.to(torch.bfloat16), None]), "n": 3})
    alias = weak["pair"][0]
    assert weak["n"] == 3 and weak["pair"][1][1] is None and isinstance(weak["pair"][1], list)
    assert alias.data_ptr() == t.data_ptr() and alias.stride() == t.stride() and alias.shape == t.shape
    assert_same_bits(alias, t)
    assert alias.untyped_storage()._cdata != t.untyped_storage()._cdata
    with pytest.raises(TypeError, match="make_weak_ref"):
        make_weak_ref(object())


# ---- the example ----


def test_the_example(device, monkeypatch, capsys, tmp_path):
    import graph_layers

    sizes = ["--layers", "2", "--hidden", "64", "--tokens", "16"]
    monkeypatch.setattr("sys.argv", ["graph_layers.py", "--device", device, *sizes, "--out", str(tmp_path)])
    graph_layers.main()
    printed = capsys.readouterr().out
    assert "102 of 102 results and gradients are equal to eager" in printed
    if device == "cuda":
        assert "host time" in printed and "<svg" in (tmp_path / "timeline.svg").read_text()
