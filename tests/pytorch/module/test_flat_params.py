# Rows of one product as one unit of memory: which operations move or keep units, and the cost of joining them.
import copy
import pickle
from io import BytesIO

import pytest
import torch
from support import assert_same_bits, randn

import transformer_engine.pytorch as te

from .flat_params_cases import SPLIT, Ran, addresses, example, in_one_buffer, joins_without_copy, linear, model, units


def run(parts, device):
    torch.manual_seed(7)
    wide, narrow = randn(6, 2, 32, device=device), randn(6, 2, 24, device=device)
    return (
        parts["layer"](wide),
        parts["cross"](wide, encoder_output=wide),
        parts["linear"](narrow),
        parts["norm_linear"](narrow),
    )


OWNERS = {
    "reverse": lambda parameters: in_one_buffer(parameters[::-1]),
    "forward": in_one_buffer,
    "unit-wise": lambda parameters: example("in_one_buffer")(parameters[::-1]),
    "one each": lambda parameters: [in_one_buffer([p], align=1) for p in parameters],
}


# ---- operations that move them ----


@pytest.mark.parametrize("owner", OWNERS)
def test_what_has_nothing_to_move_moves_nothing(owner, device):
    parts = model(device)
    wanted = run(parts, device)
    held = OWNERS[owner](list(parts.parameters()))
    before = addresses(parts)
    with Ran() as ran:
        parts.to(device).float().to(torch.float32)
        parts.requires_grad_(False).requires_grad_(True).train().eval().train()
        parts.apply(lambda part: None)
        (parts.cuda if device == "cuda" else parts.cpu)()
    assert not set(ran.names) - {"detach", "alias"}, ran.names
    parts.load_state_dict(copy.deepcopy(parts.state_dict()))
    for got, want in zip(run(parts, device), wanted, strict=True):
        assert_same_bits(got, want)
    with torch.no_grad():
        for part in parts.modules():
            if hasattr(part, "reset_parameters"):
                part.reset_parameters()
    assert addresses(parts) == before
    for buffer in held if isinstance(held, list) else [held]:
        buffer.zero_()  # the owner's step reaches the modules
    assert not any(p.any() for p in parts.parameters())


def test_a_move_of_modules_that_own_their_memory_moves_nothing(device):
    parts = model(device)
    before = addresses(parts)
    with Ran() as ran:
        parts.to(device).float()
    assert not set(ran.names) - {"detach", "alias"} and addresses(parts) == before


@pytest.mark.parametrize("owner", [None, *OWNERS])
def test_a_real_move_lays_rows_side_by_side(owner, device):
    parts = model(device)
    parameters = list(parts.parameters())
    if owner:
        OWNERS[owner](parameters)
    for there, back in ((torch.bfloat16, torch.float32), (torch.float64, torch.float32)):
        assert joins_without_copy(parts.to(there)) and joins_without_copy(parts.to(back))
    assert all(one is other for one, other in zip(parts.parameters(), parameters, strict=True))
    assert joins_without_copy(parts.half())
    assert joins_without_copy(parts.to_empty(device=device))


@pytest.mark.parametrize("flag", ["swap", "overwrite"])
def test_moves_as_torch_will_have_them(flag, device):
    """With either flag the parameters' attributes do not come along by themselves."""
    future = torch.__future__
    set_flag = getattr(future, f"set_{flag}_module_params_on_conversion")
    parts = model(device)
    marks = {name: p.row_unit for name, p in parts.named_parameters() if hasattr(p, "row_unit")}
    set_flag(True)
    try:
        before = addresses(parts)
        assert addresses(parts.to(device)) == before
        assert joins_without_copy(parts.to(torch.bfloat16))
        in_one_buffer(list(parts.parameters())[::-1])
        before = addresses(parts)
        assert addresses(parts.bfloat16()) == before
        assert joins_without_copy(parts.float())
    finally:
        set_flag(False)
    assert {name: p.row_unit for name, p in parts.named_parameters() if hasattr(p, "row_unit")} == marks
    assert all(hasattr(p, "tensor_model_parallel") for p in parts["linear"].parameters())


def test_the_meta_device(device):
    wanted = linear(device)
    module = linear("meta")
    assert all(p.is_meta for p in module.to(torch.bfloat16).to(torch.float32).parameters())
    assert joins_without_copy(module.to_empty(device=device))
    module.reset_parameters()
    assert joins_without_copy(module)
    module = te.Linear(24, 32, parameters_split=SPLIT, device="meta")
    module.reset_parameters()
    assert joins_without_copy(module)
    module = te.Linear(24, 32, parameters_split=SPLIT, device="meta")
    module.load_state_dict({k: v.clone() if v is not None else v for k, v in wanted.state_dict().items()}, assign=True)
    assert joins_without_copy(module)
    x = randn(4, 24, device=device)
    assert_same_bits(module(x), wanted(x))


def test_assigned_memory_of_an_owner_stays_with_it(device):
    source = linear(device)
    in_one_buffer(list(source.parameters())[::-1])
    module = linear("meta")
    module.load_state_dict(source.state_dict(), assign=True)
    assert addresses(module) == addresses(source)
    assert addresses(module.to(device)) == addresses(source)


@pytest.mark.parametrize("owner", [None, "reverse", "one each"])
def test_copies_have_memory_of_their_own(owner, device):
    parts = model(device)
    if owner:
        OWNERS[owner](list(parts.parameters()))
    before, wanted = addresses(parts), run(parts, device)
    other = copy.deepcopy(parts)
    assert joins_without_copy(other) and addresses(parts) == before
    for got, want in zip(run(other, device), wanted, strict=True):
        assert_same_bits(got, want)
    assert joins_without_copy(pickle.loads(pickle.dumps(other)))
    file = BytesIO()
    torch.save(parts, file)
    loaded = torch.load(BytesIO(file.getvalue()), weights_only=False)
    assert joins_without_copy(loaded) == (owner != "reverse")  # a file keeps the owner's whole buffer, and its order
    assert joins_without_copy(loaded.double())


def test_one_part_that_moves_comes_back_to_its_unit(device):
    """Unless the other parts are in an owner's memory."""
    module = linear(device)
    module.k_weight = torch.nn.Parameter(module.k_weight.double())
    assert not joins_without_copy(module.to(device))
    assert joins_without_copy(module.float())
    others = [module.q_weight, module.v_weight]
    in_one_buffer(others)
    module.k_weight = torch.nn.Parameter(module.k_weight.double())
    before = [p.data_ptr() for p in others]
    module.float()
    assert [p.data_ptr() for p in others] == before and module.k_weight.dtype == torch.float32


def test_a_first_part_without_rows(device):
    module = te.Linear(24, 32, parameters_split={"q": 0, "k": 24, "v": 8}, device=device)
    before = addresses(module)
    assert addresses(module.to(device)) == before and joins_without_copy(module)
    assert joins_without_copy(module.to(torch.bfloat16))


def test_the_empty_bias_moves_with_the_weight(device):
    module = te.Linear(24, 32, parameters_split=SPLIT, bias=False, device="meta")
    assert module.q_bias.is_meta
    module.load_state_dict(
        te.Linear(24, 32, parameters_split=SPLIT, bias=False, device=device).state_dict(), assign=True
    )
    assert module.q_bias.device.type == torch.device(device).type and module.q_bias.numel() == 0
    assert module.bfloat16().k_bias.dtype == torch.bfloat16


# ---- what joining costs ----


def test_an_owner_that_keeps_units_costs_no_copy(device):
    """The owner walks over the parameters in reverse, and finds units by their marks alone."""
    parts = model(device)
    wanted = run(parts, device)
    buffer = example("in_one_buffer")(list(parts.parameters())[::-1])
    assert all(p.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr() for p in parts.parameters())
    first, *_, last = parts.parameters()
    assert first.data_ptr() > last.data_ptr()
    with Ran() as ran:
        got = run(parts, device)
    assert "cat" not in ran.names
    for one, other in zip(got, wanted, strict=True):
        assert_same_bits(one, other)
    x = randn(6, 2, 32, device=device, requires_grad=True)
    assert not [row for row in te.explain(parts["layer"], x).rows if row.op == "noop_cat"]


def test_explain_names_what_is_copied(device):
    parts = model(device)
    wanted = run(parts, device)
    in_one_buffer(list(parts.parameters())[::-1])
    for got, want in zip(run(parts, device), wanted, strict=True):
        assert_same_bits(got, want)
    x = randn(6, 2, 32, device=device, requires_grad=True)
    rows = [row for row in te.explain(parts["layer"], x).rows if row.op == "noop_cat"]
    assert [(row.module, row.path, row.calls) for row in rows] == [
        ("self_attention.layernorm_qkv", f"copies {64 * 32 * 4:,} bytes", 1),
        ("self_attention.layernorm_qkv", "copies 256 bytes", 1),
    ]
    assert "query_weight, key_weight, value_weight" in rows[0].why_not_faster and "row_units" in rows[0].why_not_faster
    for unit in units(parts):
        unit.place(torch.empty(unit.shape, dtype=unit.dtype, device=unit.device))
    assert joins_without_copy(parts)
    assert not [row for row in te.explain(parts["layer"], x).rows if row.op == "noop_cat"]
