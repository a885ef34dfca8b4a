"""Errors of FusedAdam, with weights, states and step as before: gradients and states it cannot read, options that
exclude each other, capturable on the CPU, memory that overlaps."""

import pytest
import torch
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import Float8CurrentScaling
from transformer_engine.pytorch.optimizers import FusedAdam, FusedSGD

from .cases import assert_same, everything, give_grads, parameters, trained

MASTERS = {"master_weights": True}
FP8 = {"exp_avg_dtype": torch.uint8}


@pytest.mark.parametrize(
    "options, words",
    [
        ({"betas": (0.9, 1.0)}, ("betas", "1.0", "[0, 1)")),
        ({"betas": (0.9,)}, ("betas", "(0.9,)")),
        ({"eps": -1e-8}, ("eps", "-1e-08", ">= 0")),
        ({"lr": float("nan")}, ("lr", "nan")),
        ({"lr": torch.ones(2)}, ("lr", "[2]")),
        ({"weight_decay": None}, ("weight_decay", "None")),
        ({"exp_avg_dtype": torch.int8}, ("exp_avg_dtype", "int8", "uint8")),
        ({"exp_avg_sq_dtype": torch.float64}, ("exp_avg_sq_dtype", "float64")),
        ({**MASTERS, "master_weight_dtype": torch.bfloat16}, ("master_weight_dtype", "bfloat16", "float16")),
        ({**MASTERS, **FP8, "master_weight_dtype": torch.float16}, ("FP8 moments", "float16")),
    ],
    ids=str,
)
def test_bad_options(device, options, words):
    with refused(ValueError, "FusedAdam", *words):
        FusedAdam(parameters(device), **options)


# Options of configurations that serve every model, and what each parameter's master is kept in.
WITHOUT_EFFECT = {
    "float32 weights": (torch.float32, {**MASTERS, "store_param_remainders": True}, torch.float32),
    "no masters": (torch.bfloat16, {"store_param_remainders": True}, None),
    "float16 masters": (
        torch.bfloat16,
        {**MASTERS, "store_param_remainders": True, "master_weight_dtype": torch.float16},
        torch.float16,
    ),
    "masters' dtype without masters": (torch.bfloat16, {"master_weight_dtype": torch.bfloat16}, None),
}


@pytest.mark.parametrize("name", WITHOUT_EFFECT)
def test_options_that_have_no_effect(device, name):
    """They train as without the option."""
    dtype, options, master = WITHOUT_EFFECT[name]
    optimizer = trained(parameters(device, dtype), **options)
    states = list(optimizer.state.values())
    assert states and all(("master_param" in s and s["master_param"].dtype) or None is master for s in states)
    assert {s["master_param"].dtype if "master_param" in s else None for s in states} == {master}
    plain = trained(
        parameters(device, dtype),
        **{n: v for n, v in options.items() if n in MASTERS}
        | ({"master_weight_dtype": torch.float16} if master is torch.float16 else {}),
    )
    assert_same(everything(optimizer), everything(plain))


def test_a_group_with_remainders_that_joins(device):
    """The first weights of a model may be the ones without."""
    params = parameters(device, sizes=(4,)) + parameters(device, torch.bfloat16, sizes=(5,))
    optimizer = FusedAdam(params[:1], **MASTERS, store_param_remainders=True)
    optimizer.add_param_group({"params": params[1:]})
    give_grads(params)
    optimizer.step()
    assert [optimizer.state[p]["master_param"].dtype for p in params] == [torch.float32, torch.int16]


def test_expanded_parameters(device):
    """Named before anything is made: a step, a state, a checkpoint."""
    p = torch.nn.Parameter(torch.zeros(1, device=device).expand(4))
    p.grad = torch.ones(4, device=device)
    for options in ({}, MASTERS, FP8):
        optimizer = FusedAdam([p], **options)
        with refused(ValueError, "FusedAdam", "parameter [4]", "strides (0,)", "clone()"):
            optimizer.step()
        with refused(ValueError, "FusedAdam", "parameter [4]", "strides (0,)"):
            optimizer.initialize_state(p)
        with refused(ValueError, "FusedAdam", "parameter [4]", "strides (0,)"):
            optimizer.set_scaled_state(p, "exp_avg", torch.ones(4, device=device))
        with refused(ValueError, "FusedAdam", "parameter [4]", "strides (0,)"):
            optimizer.load_state_dict(trained(parameters(device, sizes=(4,)), 1, **options).state_dict())
        assert not any(optimizer.state.values()) and "step" not in optimizer.param_groups[0]
    with refused(ValueError, "FusedSGD", "parameter 0", "strides (0,)"):
        FusedSGD([p], lr=0.1, momentum=0.9).step()
    whole = torch.nn.Parameter(torch.zeros(8, device=device))
    whole.grad = torch.ones_like(whole)
    FusedAdam([whole.data.as_strided((1, 8), (0, 1))])  # a dimension of one has any stride


def test_amsgrad(device):
    with refused(NotImplementedError, "FusedAdam", "amsgrad", "AMSGrad", "torch.optim.AdamW"):
        FusedAdam(parameters(device), amsgrad=True)


def test_capturable_on_the_cpu():
    with refused(ValueError, "FusedAdam", "capturable", "cpu", "CUDA"):
        FusedAdam(parameters("cpu"), capturable=True)
    optimizer = FusedAdam(parameters("meta"), capturable=True)
    with refused(ValueError, "capturable", "cpu"):
        optimizer.add_param_group({"params": parameters("cpu", sizes=(3,))})
    assert len(optimizer.param_groups) == 1


def test_a_scaler_without_capturable(device):
    params = parameters(device)
    optimizer = trained(params, 1)
    before = everything(optimizer)
    with refused(ValueError, "grad_scaler", "capturable=True"):
        optimizer.step(grad_scaler=torch.amp.GradScaler(device))
    optimizer.found_inf = torch.zeros(1, device=device)
    with refused(ValueError, "found_inf", "capturable=True"):
        optimizer.step()
    assert_same(everything(optimizer), before)
    del optimizer.found_inf
    optimizer.step(grad_scaler=torch.amp.GradScaler(device, enabled=False))


def test_fp8_moments_want_float32(device):
    params = parameters(device, torch.bfloat16)
    optimizer = FusedAdam(params, **FP8)
    give_grads(params)
    with refused(ValueError, "uint8", "bfloat16", "master_weights=True"):
        optimizer.step()
    assert not any(optimizer.state.values()) and "step" not in optimizer.param_groups[0]
    trained(parameters(device, torch.bfloat16), 1, **FP8, **MASTERS)
    trained(parameters(device), 1, **FP8)


def test_quantized_weights_want_masters(device):
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        layer = te.Linear(32, 32, device=device)
    before = layer.weight.dequantize()
    layer.weight.grad = torch.ones(32, 32, device=device)
    with refused(ValueError, "Float8Tensor", "master_weights=True"):
        FusedAdam(layer.parameters()).step()
    assert torch.equal(layer.weight.dequantize(), before)


def freed(t):
    t.untyped_storage().resize_(0)
    return t


def with_grad_like(p, make):
    p.grad = None
    p.grad_dtype = None
    p.grad = make(torch.ones_like(p))


def remainder(optimizer, p):
    optimizer.state[p]["master_param"] = torch.zeros_like(p, dtype=torch.int16)
    optimizer._sorted.clear()


BAD_STEPS = {
    "sparse": (("gradient", "Sparse", "sparse=False"), lambda o, p: setattr(p, "grad", p.detach().to_sparse())),
    "freed gradient": (("grad", "freed"), lambda o, p: freed(p.grad)),
    "integers": (("grad", "Long"), lambda o, p: with_grad_like(p, torch.Tensor.long)),
    "shape of a state": (("exp_avg", "shape"), lambda o, p: o.state[p].update(exp_avg=torch.zeros(3, device=p.device))),
    "dtype of a state": (("exp_avg_sq", "Half", "Float"), lambda o, p: o.state[p].update(exp_avg_sq=p.detach().half())),
    "half of a state": (("exp_avg", "whole state"), lambda o, p: o.state[p].pop("exp_avg")),
    "no tensor": (("exp_avg", "no tensor"), lambda o, p: o.state[p].update(exp_avg=3.0)),
    "one state twice": (("overlap",), lambda o, p: o.state[p].update(exp_avg=o.state[p]["exp_avg_sq"])),
    "freed state": (("exp_avg", "freed"), lambda o, p: o.state[p].update(exp_avg=freed(torch.ones_like(p)))),
    "betas": (("betas",), lambda o, p: o.param_groups[1].update(betas=(0.9, 2.0))),
    "eps": (("eps",), lambda o, p: o.param_groups[1].update(eps=-1.0)),
    "lr": (("lr",), lambda o, p: o.param_groups[1].update(lr=None)),
    "no option": (("bias_correction",), lambda o, p: o.param_groups[1].pop("bias_correction")),
    "step": (("'step'", "-5"), lambda o, p: o.param_groups[1].update(step=-5)),
    "dtype of a remainder's weight": (("param", "Float", "bfloat16"), remainder),
}


@pytest.mark.parametrize("name", BAD_STEPS)
def test_bad_steps_change_nothing(device, name):
    """The last parameter of the second group is wrong; one of the first group has no state yet."""
    words, spoil = BAD_STEPS[name]
    params = parameters(device, sizes=(5, 6, 7))
    optimizer = FusedAdam([{"params": params[:2]}, {"params": params[2:]}], lr=0.1)
    give_grads(params)
    params[0].grad = None
    optimizer.step()
    give_grads(params, 1)
    before = everything(optimizer)
    spoil(optimizer, params[2])
    with refused(ValueError, "FusedAdam", *words):
        optimizer.step()
    after = everything_that_is_there(optimizer)
    assert_same({k: t for k, t in after.items() if k in before and not k.startswith("2 exp")},
                {k: t for k, t in before.items() if not k.startswith("2 exp")})  # fmt: skip
    assert not optimizer.state.get(params[0]) and optimizer.param_groups[0]["step"] == 1


@pytest.mark.parametrize("way", ("plain", "masters"))
def test_a_weight_that_was_turned_around(device, way):
    """Its states have as many elements, and others."""
    p = torch.nn.Parameter(torch.randn(4, 6, device=device))
    optimizer = trained([p], 1, **({} if way == "plain" else MASTERS))
    p.grad, p.data = None, p.detach().t().contiguous()
    before = everything(optimizer)
    give_grads([p])
    with refused(ValueError, "FusedAdam", "exp_avg", "[4, 6]", "[6, 4]", "initialize_state"):
        optimizer.step()
    assert_same(everything(optimizer), before)
    optimizer.initialize_state(p)
    optimizer.step()


def test_a_weight_that_was_swapped_for_a_quantized_one(device):
    params = [torch.nn.Parameter(torch.randn(16, 16, device=device)) for _ in range(2)]
    optimizer = trained([{"params": [p]} for p in params], 1, **MASTERS)
    with te.quantized_model_init(recipe=Float8CurrentScaling()):
        other = te.Linear(16, 16, device=device).weight
    params[1].grad = None
    torch.utils.swap_tensors(params[1], other)
    for p in params:
        p.grad = torch.ones(p.shape, device=device)
    before = params[0].detach().clone()
    with refused(ValueError, "FusedAdam", "'param' 0", "without memory", "swapped"):
        optimizer.step()
    assert torch.equal(params[0], before)


@pytest.mark.parametrize("option", ("amsgrad", "maximize"))
def test_groups_of_another_optimizer(device, option):
    params = parameters(device, sizes=(5, 6))
    for make in (FusedAdam, FusedSGD):
        optimizer = make(params[:1], lr=0.1)
        if make is FusedSGD and option == "amsgrad":
            continue
        with refused(NotImplementedError, make.__name__, option):
            optimizer.add_param_group({"params": params[1:], option: True})
        assert len(optimizer.param_groups) == 1
        optimizer.add_param_group({"params": params[1:], option: False})
    other = torch.optim.NAdam(params, lr=0.1).state_dict()
    with refused(ValueError, "bias_correction"):
        FusedAdam(params).load_state_dict(other)


def everything_that_is_there(optimizer):
    for state in optimizer.state.values():
        for name in [
            n for n, t in state.items() if not isinstance(t, torch.Tensor) or not t.untyped_storage().nbytes()
        ]:
            state.pop(name)
    return everything(optimizer)


def test_weights_that_overlap(device):
    whole = torch.randn(20, device=device)
    params = [torch.nn.Parameter(whole[:12]), torch.nn.Parameter(whole[8:])]
    optimizer, before = FusedAdam([{"params": params[:1]}, {"params": params[1:]}]), whole.clone()
    give_grads(params)
    with refused(ValueError, "overlap", "param"):
        optimizer.step()
    assert torch.equal(whole, before) and not any(optimizer.state.values())
    alone = [torch.nn.Parameter(whole[:8]), torch.nn.Parameter(whole[8:])]
    trained(alone, 1)


def test_memory_side_by_side(device):
    """A gradient directly before or behind its weight does not overlap it."""
    whole = torch.randn(24, device=device)
    params = [torch.nn.Parameter(whole[:8]), torch.nn.Parameter(whole[16:])]
    params[0].grad, params[1].grad = whole[8:16], torch.ones(8, device=device)
    FusedAdam(params).step()
    params[1].grad = whole[8:16]
    FusedAdam(params[1:]).step()


def test_lists_that_overlap_after_a_step(device):
    """The memory of a step that passed is compared no more, but any other memory is: of lists that begin at the same
    places, and of the former lists after a refusal."""
    whole, grads = torch.randn(24, device=device), torch.randn(24, device=device)
    moments = torch.zeros(2, 24, device=device)
    a, b = torch.nn.Parameter(whole[:8]), torch.nn.Parameter(whole[8:20])
    optimizer = FusedAdam([a, b])

    def size(n):
        a.data, a.grad = whole[:n], None
        a.grad, b.grad = grads[:n], torch.ones_like(b)
        optimizer.state[a] = {"exp_avg": moments[0, :n], "exp_avg_sq": moments[1, :n]}

    for parameter in (a, b):
        optimizer.initialize_state(parameter)
    size(8)
    optimizer.step()
    size(12)
    with refused(ValueError, "overlap", "param"):
        optimizer.step()
    size(8)
    a.grad = moments[0, :8]
    with refused(ValueError, "overlap", "grad"):
        optimizer.step()
    size(8)
    former, optimizer.state[a]["exp_avg"] = optimizer.state[a]["exp_avg"], optimizer.state[b]["exp_avg"][:8]
    with refused(ValueError, "overlap", "exp_avg"):
        optimizer.step()
    optimizer.state[a]["exp_avg"], a.grad = former, former
    with refused(ValueError, "overlap", "grad"):
        optimizer.step()


def test_a_gradient_that_is_its_weight(device):
    (p,) = parameters(device, sizes=(4,))
    p.grad = p.detach()
    with refused(ValueError, "overlap", "grad"):
        FusedAdam([p]).step()


def test_parameters_on_meta():
    params = parameters("meta", sizes=(4,))
    optimizer = FusedAdam(params)
    optimizer.step()  # nothing has a gradient
    params[0].grad = torch.empty_like(params[0])
    with refused(ValueError, "meta", "to_empty"):
        optimizer.step()


def test_doubles(device):
    with refused(ValueError, "FusedAdam", "Double"):
        trained(parameters(device, torch.float64), 1)


def test_initialize_state_with_remainders(device):
    (p,) = parameters(device)[3:4]
    with refused(ValueError, "initialize_state", "store_param_remainders", "was made"):
        FusedAdam([p], **MASTERS).initialize_state(p, store_param_remainders=True)
    optimizer = FusedAdam([p], **MASTERS, store_param_remainders=True)
    optimizer.initialize_state(p, store_param_remainders=True)  # a float32 weight has no remainders in any case
    assert optimizer.state[p]["master_param"].dtype is torch.float32


def test_set_grad_none_is_deprecated(device):
    with pytest.warns(DeprecationWarning, match="set_grad_none"):
        optimizer = FusedAdam(parameters(device), set_grad_none=False)
    give_grads(optimizer.param_groups[0]["params"])
    optimizer.zero_grad()
    assert optimizer.param_groups[0]["params"][4].grad is not None
