# te.explain: the paths that a run really took. On the GPU torch's profiler is the judge of which kernels ran. Mutant:
# calling note_width(true, true) in activation.cu turns test_why_not_faster red (on the GPU).
import re

import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te


def paths(explanation, op):
    return [(row.path, row.why_not_faster, row.calls) for row in explanation.rows if row.op == op]


def mlp(device, hidden=64, ffn=128, **options):
    return te.LayerNormMLP(hidden, ffn, activation="swiglu", device=device, params_dtype=torch.bfloat16, **options)


def test_every_op_of_a_run_is_there(device):
    module = mlp(device)
    found = {(row.op, row.calls) for row in te.explain(module).rows}
    assert found == {
        ("normalization_fwd", 1),
        ("linear_fwd", 2),
        ("activation_fwd", 1),
        ("linear_dgrad", 2),
        ("linear_wgrad", 2),
        ("activation_bwd", 1),
        ("normalization_bwd", 1),
    }
    again = {(row.op, row.calls) for row in te.explain(mlp(device, checkpoint=True)).rows}
    assert again == found - {("normalization_fwd", 1), ("linear_fwd", 2)} | {
        ("normalization_fwd", 2),
        ("linear_fwd", 3),
    }


def test_frozen_weights_have_no_product(device):
    module = mlp(device)
    module.fc1_weight.requires_grad_(False)
    module.fc1_bias.requires_grad_(False)
    assert [row.calls for row in te.explain(module).rows if row.op == "linear_wgrad"] == [1]


def test_a_backward_that_recomputes_keeps_the_names(device):
    """Unpacking tensors of a checkpoint runs modules, in the middle of the backward of another module."""
    inner = torch.nn.Sequential(mlp(device), te.Linear(64, 64, device=device, params_dtype=torch.bfloat16))

    class Checkpointed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return te.checkpoint(self.inner, x, use_reentrant=False)

    rows = te.explain(Checkpointed(), randn(8, 64, dtype=torch.bfloat16, device=device, requires_grad=True)).rows
    products = {(row.module, row.op, row.calls) for row in rows if row.op in ("linear_dgrad", "linear_wgrad")}
    assert products == {(f"inner.{i}", op, 2 - i) for i in (0, 1) for op in ("linear_dgrad", "linear_wgrad")}


@pytest.mark.parametrize("module", [torch.nn.LSTM(4, 8), torch.nn.Linear(4, 4), torch.nn.Bilinear(3, 4, 5)])
def test_the_input_of_other_modules_is_not_guessed(module):
    with refused(TypeError, "explain", type(module).__name__, "te.explain(module, *sample)"):
        te.explain(module)


def test_cpu_paths():
    rows = te.explain(mlp("cpu")).rows
    assert {row.path for row in rows} == {"CPU loop", "LibTorch's CPU product"}
    text = str(te.explain(mlp("cpu")))
    assert "why not faster" in text and "activation_bwd" in text


def test_main_grad_and_delayed_gradients_are_left_alone(device):
    module = mlp(device, fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    for p in (module.fc1_weight, module.fc2_weight):
        p.main_grad = torch.zeros(p.shape, device=device)
    te.explain(module)
    assert all(p.main_grad.eq(0).all() for p in (module.fc1_weight, module.fc2_weight))
    with pytest.raises(RuntimeError, match="no weight gradient"):
        module.backward_dw()
    assert module.fuse_wgrad_accumulation and module.need_backward_dw()


def attention_paths(device, dtype=torch.bfloat16, **options):
    module = te.DotProductAttention(4, 32, 2, attn_mask_type="causal", **options)
    q, k, v = (randn(16, 2, n, 32, dtype=dtype, device=device, requires_grad=True) for n in (4, 2, 2))
    return paths(te.explain(module, q, k, v), "attention"), (module, q, k, v)


def test_attention_on_the_cpu():
    ((path, why, calls),), _ = attention_paths("cpu", torch.float32)
    assert (path, calls) == ("torch's fused CPU attention", 1) and why
    ((path, why, _),), _ = attention_paths("cpu", torch.float32, attention_dropout=0.5)
    assert path == "torch's plain attention" and "dropout" in why


@pytest.mark.gpu
@pytest.mark.parametrize("deterministic", [False, True])
def test_attention_backend_is_the_one_that_ran(deterministic):
    """By the name of the operation that torch dispatched."""
    torch.use_deterministic_algorithms(deterministic)
    ((path, why, _),), (module, q, k, v) = attention_paths("cuda")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        module(q, k, v)
    ran = {e.key for e in profile.key_averages()}
    assert path == ("flash" if deterministic else "cuDNN")
    assert f"aten::_scaled_dot_product_{'flash' if deterministic else 'cudnn'}_attention" in ran
    assert ("Deterministic" in why) == deterministic


@pytest.mark.gpu
def test_why_not_faster():
    fast = te.explain(mlp("cuda"))
    assert paths(fast, "activation_fwd") == [("CUDA, 16-byte accesses", "", 1)]
    assert paths(fast, "normalization_fwd") == [("CUDA, each row read once, held on the chip", "", 1)]
    ((path, why, calls),) = paths(fast, "linear_fwd")
    assert path == "cuBLASLt, its heuristic's first algorithm" and "te.tune" in why and calls == 2
    narrow = te.explain(mlp("cuda", hidden=63))
    for op in ("normalization_fwd", "normalization_bwd"):
        ((path, why, _),) = paths(narrow, op)
        assert path == "CUDA, one element at a time" and "not a multiple of 16 bytes" in why
    odd = te.explain(mlp("cuda", ffn=127))
    assert paths(odd, "activation_fwd") == [
        ("CUDA, one element at a time", "the last dimension is not a multiple of 16 bytes", 1)
    ]
    assert all("one element at a time" in path and why for path, why, _ in paths(odd, "activation_bwd"))


@pytest.mark.gpu
@pytest.mark.parametrize("ffn", [128, 127])
def test_the_kernels_that_ran_are_those_it_names(ffn):
    """forward_kernel<..., width> is instantiated with 8 elements per thread on the wide path, and 1 otherwise."""
    module, x = mlp("cuda", ffn=ffn), randn(64, 64, dtype=torch.bfloat16, device="cuda", requires_grad=True)
    ((path, _, _),) = paths(te.explain(module, x), "activation_fwd")
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        module(x)
        torch.cuda.synchronize()
    names = [e.key for e in profile.key_averages() if "activation" in e.key and "forward_kernel" in e.key]
    assert len(names) == 1, names
    width = 8 if path == "CUDA, 16-byte accesses" else 1
    assert re.search(r"bf16, (?:\(int\))?(\d+), te::quantize", names[0]).group(1) == str(width), names
