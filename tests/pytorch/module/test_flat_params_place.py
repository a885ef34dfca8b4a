# Rows of one product in memory that the caller gives them, and the marks by which frameworks recognize such units.
import copy
import pickle
from io import BytesIO

import pytest
import torch
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te

from .flat_params_cases import (
    EXAMPLE,
    SPLIT,
    Ran,
    addresses,
    example,
    in_one_buffer,
    joins_without_copy,
    linear,
    model,
    units,
)

# ---- marks ----


def test_marks_tell_units_apart(device):
    parts = model(device)
    found = {}
    for name, p in parts.named_parameters():
        if hasattr(p, "row_unit"):
            number, place, count = p.row_unit
            found.setdefault(number, []).append((place, count, name))
    listed = [(unit._module, unit.names) for unit in units(parts)]
    assert len(found) == len(listed) == 2 * 4
    for members in found.values():
        assert [place for place, _, _ in members] == list(range(members[0][1])) and len(members) == members[0][1]
    blocks = example("blocks")(list(parts.parameters())[::-1])
    assert {tuple(map(id, block)) for block in blocks if len(block) > 1} == {
        tuple(map(id, unit.parameters)) for unit in units(parts)
    }


def test_marks_go_where_parameters_go(device):
    module = linear(device)
    numbers = {p.row_unit[0] for p in module.parameters()}
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        marks = [p.row_unit for p in other.parameters()]
        assert [mark[1:] for mark in marks] == [(0, 3), (1, 3), (2, 3)] * 2
        assert len({mark[0] for mark in marks}) == 2 and not {mark[0] for mark in marks} & numbers
    for moved in (module.bfloat16(), linear("meta").to_empty(device=device)):
        assert all(hasattr(p, "row_unit") for p in moved.parameters())
    module.load_state_dict({k: v.clone() if v is not None else v for k, v in module.state_dict().items()}, assign=True)
    assert {p.row_unit[0] for p in module.parameters()} == numbers
    file = BytesIO()
    torch.save(list(module.parameters()), file)
    assert [p.row_unit for p in torch.load(BytesIO(file.getvalue()))] == [p.row_unit for p in module.parameters()]
    assert not any(hasattr(p, "row_unit") for p in te.Linear(24, 32, device=device).parameters())


# ---- a place for them ----


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_units_of_a_module(kind, bias, device):
    module = linear(device, kind, bias=bias)
    listed = module.row_units()
    weight = listed[0]
    assert [unit.names for unit in listed] == [
        tuple(f"{name}_{what}" for name in SPLIT) for what in ("weight", "bias")[: 1 + bias]
    ]
    assert (weight.shape, weight.dtype, weight.device) == ((32, 24), torch.float32, module.q_weight.device)
    assert all(one is getattr(module, name) for one, name in zip(weight.parameters, weight.names, strict=True))
    assert "q_weight, k_weight, v_weight" in repr(weight) and weight.in_order()
    assert kind(24, 32, device=device).row_units() == [] == te.LayerNormMLP(24, 32, device=device).row_units()
    torch.nn.utils.parametrizations.weight_norm(module, "k_weight")
    assert [unit.names[0] for unit in module.row_units()] == ["q_bias"] * bias


def test_place(device):
    module = linear(device)
    x, dy = randn(4, 24, device=device), randn(4, 32, device=device)
    y = module(x)
    y.backward(dy)
    grads, parameters, marks = [p.grad for p in module.parameters()], list(module.parameters()), [*addresses(module)]
    weight, bias = module.row_units()
    flat = torch.full((3 + 32 * 24 + 5 + 32,), torch.nan, device=device)
    weight.place(flat[3 : 3 + 32 * 24])
    bias.place(flat[-32:].view(4, 8))
    assert joins_without_copy(module) and module.q_weight.data_ptr() == flat[3:].data_ptr()
    assert module.v_bias.data_ptr() == flat[-8:].data_ptr() and flat.isnan().sum() == 8
    assert_same_bits(module(x), y)
    assert all(one is other for one, other in zip(module.parameters(), parameters, strict=True))
    assert all(p.grad is grad for p, grad in zip(module.parameters(), grads, strict=True))
    assert [*addresses(module)] == marks and all(hasattr(p, "row_unit") for p in parameters)
    before = addresses(module)
    with Ran() as ran:
        weight.place(flat[3 : 3 + 32 * 24])
    assert not {"copy_", "clone"} & set(ran.names)
    assert addresses(module.to(device)) == before
    module.requires_grad_(False)
    module.to(torch.bfloat16)
    assert joins_without_copy(module) and flat.isnan().sum() == 8


def test_place_in_the_memory_that_they_are_in(device):
    """Sorts an owner's buffer in place: no value is overwritten before it is read, and a backward that would read
    overwritten values raises an error."""
    module = linear(device, bias=False)
    x = randn(4, 24, device=device)
    wanted = module(x).detach()
    (unit,) = module.row_units()
    flat = in_one_buffer(unit.parameters[::-1], align=1)
    copied = module(x)  # holds a copy: its backward may run
    unit.place(flat)
    assert unit.in_order() and module.q_weight.data_ptr() == flat.data_ptr()
    assert_same_bits(module(x), wanted)
    copied.sum().backward()
    wider = torch.empty(33, 24, device=device)
    unit.place(wider[1:])
    x.requires_grad_()
    pending = module(x)
    unit.place(wider[:-1])
    assert_same_bits(module(x), wanted)
    with pytest.raises(RuntimeError, match="modified in"):
        pending.sum().backward()
    pending = module(x)
    unit.place(torch.empty(32, 24, device=device))  # elsewhere: what it holds is as it was
    pending.sum().backward()


def test_place_right_behind_the_memory_that_they_are_in(device):
    """Which a caching allocator gives next: nothing is written over, so a pending backward may run."""
    module, x = linear(device, bias=False), randn(4, 24, device=device)
    (unit,) = module.row_units()
    memory = torch.empty(64, 24, device=device)
    unit.place(memory[:32])
    pending = module(x)
    unit.place(memory[32:])
    pending.sum().backward()


def test_a_buffer_that_does_not_fit_changes_nothing(device):
    module = linear(device)
    unit = module.row_units()[0]
    before, values = addresses(module), [p.detach().clone() for p in module.parameters()]
    freed = torch.empty(32, 24, device=device)
    freed.untyped_storage().resize_(0)
    with torch.inference_mode():
        inference = torch.empty(32, 24, device=device)
    for buffer, words in (
        (torch.empty(31, 24, device=device), ("[31, 24]", "[32, 24]")),
        (torch.empty(32, 24, device=device, dtype=torch.bfloat16), ("torch.bfloat16", "torch.float32")),
        (torch.empty(32, 24, device="meta"), ("on meta",)),
        (torch.empty(24, 32, device=device).t(), ("not contiguous",)),
        (torch.empty(32, 48, device=device)[:, ::2], ("not contiguous",)),
        (torch.empty(32, 24, device=device).to_sparse(), ("not contiguous",)),
        (freed, ("freed",)),
        (inference, ("inference mode",)),
        (None, ("NoneType",)),
        ([0.0] * 768, ("list",)),
    ):
        with refused(ValueError, "Linear", "row_units", "'buffer'", *words):
            unit.place(buffer)
        assert addresses(module) == before
    module.k_weight = torch.nn.Parameter(module.k_weight.double())
    with refused(ValueError, "q_weight, k_weight, v_weight", "torch.float64", "convert the module"):
        unit.place(torch.empty(32, 24, device=device))
    module.k_weight = module.v_weight
    with refused(ValueError, "one for each name"):
        unit.place(torch.empty(32, 24, device=device))
    for p, value in zip([module.q_weight, module.v_weight], [values[0], values[2]], strict=True):
        assert_same_bits(p.detach(), value)


def test_the_pages_example_runs():
    exec(EXAMPLE.group(1), {})


def test_place_in_memory_between_the_rows_of_a_parameter(device):
    """Rows with gaps reach further than their bytes."""
    module = te.Linear(32, 32, parameters_split={"a_": 16, "b_": 16}, device=device)
    (unit,) = [unit for unit in module.row_units() if unit.shape == (32, 32)]
    wanted = torch.cat([p.detach().clone() for p in unit.parameters])
    owner = torch.zeros(4096, device=device)
    spread = owner[:1024].view(16, 64)[:, :32]
    spread.copy_(module.a_weight.detach())
    module.a_weight.data = spread
    unit.place(owner[600 : 600 + 1024])
    assert unit.in_order()
    assert_same_bits(torch.cat([p.detach() for p in unit.parameters]), wanted)
