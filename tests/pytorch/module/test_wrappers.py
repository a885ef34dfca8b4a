# Modules in PyTorch's wrappers: compile, copies that train on, files, several threads, several uses in one step, and
# checkpoints that do not fit. Mutant: a loader that copies before it has compared the keys turns the last ones red.
import copy
import io
import pickle

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from families import BATCH, EVERY_FAMILY, FAMILIES, SEQ, build, inputs_of, loss_of, train
from plain_modules import as_tuple, run
from support import assert_same_bits, in_threads

every_family = pytest.mark.parametrize("name", FAMILIES)
COMPILED_ELSEWHERE = ("Linear", "LayerNormLinear", "LayerNormMLP", "MultiheadAttention", "TransformerLayer")
really_every_family = pytest.mark.parametrize("name", EVERY_FAMILY)


def same_bits(got, wanted, what=""):
    assert list(got) == list(wanted)
    for key, want in wanted.items():
        assert_same_bits(got[key], want, f"{what} {key}")


def tensors_of(module):
    return {key: p.detach() for key, p in module.named_parameters()}


# ---- torch.compile: test_modules.py has the other families ----

compiled_here = pytest.mark.parametrize("name", [n for n in EVERY_FAMILY if n not in COMPILED_ELSEWHERE])


@compiled_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled_it_is_one_graph_with_the_bits_of_eager(device, name, dtype):
    module, inputs = build(name, device, dtype), inputs_of(name, device, dtype)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    wanted = run(module, *inputs)
    same_bits(run(module, *inputs, call=lambda _, *given: compiled(*given)), wanted, name)


@compiled_here
def test_compiled_once_for_any_length(device, name):
    module = build(name, device)
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=True)
    for seq, batch in ((5, 3), (7, 4), (11, 6)):  # sizes that no dimension of the module has
        inputs = inputs_of(name, device, seq=seq, batch=batch)
        with torch.compiler.set_stance("default" if seq == 5 else "fail_on_recompile"):
            got = run(module, *inputs, call=lambda _, *given: compiled(*given))
        same_bits(got, run(module, *inputs), f"{name} [{seq}, {batch}]")


# ---- torch.jit.trace ----


@really_every_family
@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.filterwarnings("ignore")  # attention warns that its kernel is the one of the sample
def test_a_trace_computes_with_other_values(device, name, grad):
    """A trace has what went through the dispatcher; from a call that went past it, it would return empty memory."""
    module = build(name, device)
    with torch.set_grad_enabled(grad):
        traced = torch.jit.trace(module, tuple(inputs_of(name, device)), check_trace=False)
        for inputs in (inputs_of(name, device), inputs_of(name, device, seq=SEQ + 3, batch=BATCH)):
            got, wanted = traced(*inputs), module(*inputs)
            if device == "cuda" and ("Attention" in name or "Transformer" in name):
                torch.testing.assert_close(got, wanted)  # a trace has no sdpa_kernel(): torch chooses a kernel again
            else:
                assert_same_bits(got, wanted, name)


# ---- copies and files ----


def through_a_file(module):
    file = io.BytesIO()
    torch.save(module, file)
    file.seek(0)
    return torch.load(file, weights_only=False)


COPIES = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda module: pickle.loads(pickle.dumps(module)),
    "torch.save": through_a_file,
}


@every_family
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_trains_on_with_the_same_bits(device, name, how):
    """After a step, so that gradients and whatever else a step leaves are copied too."""
    module, batches = build(name, device), [inputs_of(name, device)[0] for _ in range(4)]
    train(module, batches[:2], torch.optim.SGD(module.parameters(), 0.1))
    other = COPIES[how](module)
    for own, copied in zip(module.parameters(), other.parameters(), strict=True):
        assert own.data_ptr() != copied.data_ptr()
    wanted = train(module, batches[2:], torch.optim.SGD(module.parameters(), 0.1))
    got = train(other, batches[2:], torch.optim.SGD(other.parameters(), 0.1))
    for one, two in zip(got, wanted, strict=True):
        assert_same_bits(one, two)
    same_bits(tensors_of(other), tensors_of(module))


@really_every_family
def test_modules_without_parameters_copy_too(device, name):
    module, inputs = build(name, device), inputs_of(name, device)
    wanted = run(module, *inputs)
    for how, make in COPIES.items():
        same_bits(run(make(module), *inputs), wanted, how)


def by_torch(state, folder):
    torch.save(state, folder / "state.pt")
    return torch.load(folder / "state.pt", weights_only=True)


def by_safetensors(state, folder):
    """safetensors needs a storage for each tensor, which the parts of a split weight do not have."""
    safetensors.torch.save_file({key: t.clone() for key, t in state.items()}, folder / "state.safetensors")
    return safetensors.torch.load_file(folder / "state.safetensors")


def by_dcp(state, folder):
    dcp.save(state, checkpoint_id=folder / "dcp")
    loaded = {key: torch.full_like(t, 7) for key, t in state.items()}
    dcp.load(loaded, checkpoint_id=folder / "dcp")
    return loaded


@every_family
@pytest.mark.parametrize("save_and_load", [by_torch, by_safetensors, by_dcp])
@pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")
def test_state_through_a_file(device, name, save_and_load, tmp_path):
    module, inputs = build(name, device), inputs_of(name, device)
    state = module.state_dict()
    loaded = save_and_load(state, tmp_path)
    assert sorted(loaded) == sorted(state)
    other = FAMILIES[name](device=device)
    assert str(other.load_state_dict(loaded)) == "<All keys matched successfully>"
    same_bits(run(other, *inputs), run(module, *inputs))


# ---- several uses ----


@every_family
def test_used_twice_in_a_step(device, name):
    """Behind itself and beside itself: gradients are those of the separate calls, added up."""
    module, (one,), (two,) = build(name, device), inputs_of(name, device), inputs_of(name, device)
    module.zero_grad()
    (loss_of(module(one)) + loss_of(module(two))).backward()
    got = {key: p.grad for key, p in module.named_parameters()}
    module.zero_grad()
    loss_of(module(two)).backward()
    loss_of(module(one)).backward()
    same_bits(got, {key: p.grad for key, p in module.named_parameters()})


@really_every_family
def test_several_threads_through_one_module(device, name):
    module = build(name, device)
    inputs = [[t.requires_grad_() for t in inputs_of(name, device)] for _ in range(4)]

    def step(i):
        leaves = [t.detach().clone().requires_grad_() for t in inputs[i]]
        out = as_tuple(module(*leaves))[0]
        return [out.detach(), *torch.autograd.grad(loss_of(out), leaves)]

    wanted = [step(i) for i in range(4)]
    for got, want in zip(in_threads(4, step), wanted, strict=True):
        for a, b in zip(got, want, strict=True):
            assert_same_bits(a, b)


# ---- checkpoints that do not fit ----


def spoiled(state):
    key = next(iter(k for k in state if not k.endswith("_extra_state")))
    other = {k: t + 1 if t.is_floating_point() else t for k, t in state.items()}
    yield "missing", {k: t for k, t in other.items() if k != key}, ("Missing key", key)
    yield "extra", {**other, "unknown_weight": torch.ones(2)}, ("Unexpected key", "unknown_weight")
    yield "shape", {**other, key: torch.ones(3, 5)}, ("size mismatch", key)
    yield "no tensor", {**other, key: [0.0] * 3}, ("type mismatch", key, "list", "tensor")
    yield "complex", {**other, key: state[key].to(torch.complex64)}, ("type mismatch", key, "complex64", "real")
    yield "quantized", {**other, extra_key(state): torch.ones(3, dtype=torch.uint8)}, ("_extra_state", "3 bytes")


def extra_key(state):
    return next(k for k in state if k.endswith("_extra_state"))


@every_family
def test_a_checkpoint_that_does_not_fit_changes_nothing(device, name):
    module = build(name, device)
    before = {key: t.clone() for key, t in module.state_dict().items()}
    for what, state, words in spoiled(module.state_dict()):
        for assign in (False, True):
            with pytest.raises((RuntimeError, ValueError)) as caught:
                module.load_state_dict(state, assign=assign)
            assert all(word in str(caught.value) for word in (*words, type(module).__name__)) or what == "quantized"
            same_bits(dict(module.state_dict()), before, what)


@every_family
def test_what_fits_in_part_is_loaded_on_request(device, name):
    module = build(name, device)
    state = {k: t + 1 if t.is_floating_point() else t for k, t in module.state_dict().items()}
    (key, *_), extra = [k for k in state if not k.endswith("_extra_state")], {"unknown": torch.ones(1)}
    kept = module.state_dict()[key].clone()
    result = module.load_state_dict({**{k: t for k, t in state.items() if k != key}, **extra}, strict=False)
    assert (result.missing_keys, result.unexpected_keys) == ([key], ["unknown"])
    for k, t in module.state_dict().items():
        assert_same_bits(t, kept if k == key else state[k], k)


@pytest.mark.parametrize(
    "state", [io.BytesIO(), torch.empty(0, dtype=torch.uint8), None], ids=["bytes", "tensor", "none"]
)
def test_extra_state_without_content_loads(device, state):
    module, inputs = build("Linear", device), inputs_of("Linear", device)
    given = {**module.state_dict(), "_extra_state": state}
    assert module.load_state_dict(given).missing_keys == []
    assert module(*inputs) is not None


@pytest.mark.parametrize(
    "state, error, words",
    [
        (io.BytesIO(b"scales"), ValueError, "6 bytes that cannot be read safely"),
        (torch.ones(3, dtype=torch.uint8), ValueError, "3 bytes that cannot be read safely"),
        ({"scale": 1}, ValueError, "is a dict, wanted a uint8 tensor or an io.BytesIO"),
    ],
    ids=["bytes", "tensor", "dict"],
)
def test_extra_state_with_content_is_named_and_nothing_loads(device, state, error, words):
    module = build("Linear", device)
    before = {key: p.clone() for key, p in tensors_of(module).items()}
    given = {key: torch.zeros_like(p) for key, p in tensors_of(module).items()} | {"_extra_state": state}
    with pytest.raises(error, match=words):
        module.load_state_dict(given)
    same_bits(tensors_of(module), before)
