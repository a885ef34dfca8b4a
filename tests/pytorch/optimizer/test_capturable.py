"""Capturable FusedAdam: step and lr on the device change no bit, a flag or a GradScaler skips and unscales there. It is
refused on a CPU; here the tests let it, and its code is the same. On a GPU steps are captured and replayed."""

import copy

import pytest
import torch
from quantized_cases import FORMATS, parts_of
from support import assert_same_bits, randn, refused

from transformer_engine.pytorch.optimizers import FusedAdam, adam_groups

from .cases import assert_same, everything, give_grads, more_steps, parameters, trained

OPTIONS = {"lr": 3e-3, "weight_decay": 0.1}
FORMS = {
    "plain": {},
    "masters": {"master_weights": True},
    "remainders": {"master_weights": True, "store_param_remainders": True},
    "bfloat16": {"master_weights": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "float16": {"master_weights": True, "exp_avg_dtype": torch.float16, "master_weight_dtype": torch.float16},
    "fp8": {"master_weights": True, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
}


@pytest.fixture(autouse=True)
def anywhere(monkeypatch):
    monkeypatch.setattr(adam_groups, "_is_capturable_on", lambda device: True)


@pytest.mark.parametrize("name", FORMS)
def test_equals_an_optimizer_that_is_not_capturable(device, name):
    a, b = (
        trained(parameters(device, torch.bfloat16), 4, **OPTIONS, **FORMS[name], capturable=c) for c in (True, False)
    )
    assert_same(everything(a), everything(b))
    group = a.param_groups[0]
    assert group["step"].dtype is torch.int32 and group["step"].tolist() == [4] and b.param_groups[0]["step"] == 4
    assert group["lr"].dtype is torch.float32 and group["lr"].device == group["params"][0].device


@pytest.mark.parametrize("name", FORMS)
def test_a_flag_skips_everything(device, name):
    params = parameters(device, torch.bfloat16)
    optimizer = trained(params, 2, **OPTIONS, **FORMS[name], capturable=True)
    before = everything(optimizer)
    give_grads(params, 2)
    grads = [p.grad.clone() for p in params]
    optimizer.found_inf, optimizer.grad_scale = torch.ones(1, device=device), torch.tensor(4.0, device=device)
    optimizer.step()
    assert_same(everything(optimizer), before)
    assert optimizer.param_groups[0]["step"].item() == 2
    assert all(torch.equal(p.grad, g) for p, g in zip(params, grads, strict=True))
    optimizer.found_inf = torch.zeros((), device=device)
    optimizer.step()
    assert optimizer.param_groups[0]["step"].item() == 3
    for p, g in zip(params, grads, strict=True):
        assert_same_bits(p.grad, g * 0.25)


@pytest.mark.parametrize("name", FORMATS)
def test_a_flag_skips_quantized_weights(device, name):
    weight = torch.nn.Parameter(FORMATS[name](device=device)(randn(40, 48, device=device)))
    optimizer = trained([weight], 1, lr=0.1, master_weights=True, capturable=True)
    before = {key: t.clone() for key, t in parts_of(weight).items()}
    optimizer.found_inf = torch.ones(1, device=device)
    more_steps(optimizer, 1, 1)
    for key, t in parts_of(weight).items():
        assert_same_bits(t, before[key], key)
    del optimizer.found_inf
    twin = torch.nn.Parameter(FORMATS[name](device=device)(torch.zeros(40, 48, device=device)))
    with torch.no_grad():
        twin.quantize_(weight)


def test_gradscaler(device):
    """The scaler passes itself; one step has an Inf. As a plain optimizer that the scaler skips by itself."""
    runs = []
    for capturable in (True, False):
        params = parameters(device)
        optimizer = FusedAdam(params, lr=0.1, capturable=capturable)
        scaler = torch.amp.GradScaler(device, init_scale=256.0, growth_interval=100)
        for step in range(4):
            give_grads(params, step, scale=256.0)
            scaler.scale(torch.zeros(1, device=device))
            if step == 2:
                params[2].grad[0] = torch.nan
            if step == 3:
                scaler.update(256.0)
                scaler.scale(torch.zeros(1, device=device))
                scaler.unscale_(optimizer)
            with pytest.warns(FutureWarning) if capturable else pytest.MonkeyPatch.context():
                scaler.step(optimizer)
            scaler.update()
        runs.append((everything(optimizer), int(optimizer.param_groups[0]["step"]), scaler.get_scale()))
    assert_same(runs[0][0], runs[1][0])
    assert runs[0][1:] == runs[1][1:] == (3, 256.0)


def test_numbers_keep_the_memory(device):
    params = parameters(device)
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}, {"params": []}], lr=0.5, capturable=True)
    memory = [group["lr"].data_ptr() for group in optimizer.param_groups]
    assert len(set(memory)) == 3 and [g["lr"].item() for g in optimizer.param_groups] == [0.5] * 3
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [g["lr"].item() for g in optimizer.param_groups] == [0.25] * 3
    for group in optimizer.param_groups:
        group["lr"] = 0.125
    more_steps(optimizer, 1)
    assert [group["lr"].data_ptr() for group in optimizer.param_groups] == memory
    assert [g["lr"].item() for g in optimizer.param_groups] == [0.125] * 3
    assert [g["step"].item() for g in optimizer.param_groups] == [1, 1, 1]
    optimizer.load_state_dict(optimizer.state_dict())
    assert [group["lr"].data_ptr() for group in optimizer.param_groups] == memory


def test_checkpoints_between_the_two(device):
    device_steps, host_steps = (trained(parameters(device), 2, **OPTIONS, capturable=c) for c in (True, False))
    lr, step = (device_steps.param_groups[0][name] for name in ("lr", "step"))
    for of, into in ((host_steps, device_steps), (device_steps, host_steps)):
        saved = copy.deepcopy(of.state_dict())
        more_steps(into, 2, 5)
        into.load_state_dict(saved)
        assert int(into.param_groups[0]["step"]) == 2
    assert device_steps.param_groups[0]["lr"] is lr and device_steps.param_groups[0]["step"] is step
    more_steps(device_steps, 2, 2)
    more_steps(host_steps, 2, 2)
    assert_same(everything(device_steps), everything(host_steps))
    again = copy.deepcopy(device_steps)
    more_steps(again, 1, 4)
    more_steps(device_steps, 1, 4)
    assert_same(everything(again), everything(device_steps))


def test_decoupled_gradients_and_a_scaler(device):
    optimizer = FusedAdam(parameters(device), capturable=True, use_decoupled_grad=True)
    with refused(ValueError, "grad_scaler", "use_decoupled_grad", "found_inf"):
        optimizer.step(grad_scaler=torch.amp.GradScaler(device))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_captured_steps_are_eager_ones(name):
    """lr and flag are read at each replay; gradients keep their memory."""
    ours, theirs = (
        trained(parameters("cuda", torch.bfloat16), 1, **OPTIONS, **FORMS[name], capturable=True) for _ in range(2)
    )
    a, b = (o.param_groups[0]["params"] for o in (ours, theirs))
    give_grads(a)
    flag = torch.zeros(1, device="cuda")
    ours.found_inf = flag
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ours.step()
    for step in range(4):
        for p, q in zip(a, b, strict=True):
            q.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).to(p)
            p.grad.copy_(q.grad)
        lr = 1e-2 / (step + 1)
        ours.param_groups[0]["lr"].fill_(lr)
        theirs.param_groups[0]["lr"] = lr
        theirs.found_inf = flag.fill_(step == 2).clone()
        graph.replay()
        theirs.step()
    assert ours.param_groups[0]["step"].item() == theirs.param_groups[0]["step"].item() == 4
    assert_same(everything(ours), everything(theirs))


@pytest.mark.gpu
def test_what_a_capture_refuses():
    params = parameters("cuda")
    optimizer = FusedAdam(params, capturable=True)
    give_grads(params)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        with refused(ValueError, "no state yet", "initialize_state"):
            optimizer.step()
    more_steps(optimizer, 1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        optimizer.param_groups[0]["lr"] = 0.5
        with refused(ValueError, "lr", "captured"):
            optimizer.step()
    plain = trained(parameters("cuda"), 1)
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        with refused(ValueError, "capturable=False", "captured"):
            plain.step()


@pytest.mark.gpu
def test_a_group_on_several_devices(monkeypatch):
    monkeypatch.undo()
    with refused(ValueError, "capturable", "cpu"):
        FusedAdam(parameters("cuda") + parameters("cpu"), capturable=True)
