# Rows of one product as one unit of memory: who moves them, who may keep them, what joining them costs. Mutants, each
# turns a test red: _settle joins without looking at where units lay before; _join leaves out the look at the storages'
# sizes; unit_marks numbers each parameter; place does not raise the versions of what it writes over; noop_cat says
# nothing to te.explain.
import copy
import pickle
import re
from io import BytesIO
from pathlib import Path

import pytest
import torch
from support import assert_same_bits, randn, refused
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te

EXAMPLE = re.search(
    r"^```python\n(.*?)^```", (Path(__file__).parents[3] / "docs/parameters.md").read_text(), re.M | re.S
)
SPLIT = {"q": 16, "k": 8, "v": 8}


class Ran(TorchDispatchMode):
    """The operations that ran, below autograd."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def linear(device="cpu", kind=te.Linear, **options):
    torch.manual_seed(5)
    module = kind(24, 32, parameters_split=SPLIT, device=device, **options)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.normal_()
    return module


def model(device):
    """Each module that has units, by itself and inside of others."""
    torch.manual_seed(6)
    layer = te.TransformerLayer(32, 64, 4, num_gqa_groups=2, device=device, attention_dropout=0.0, hidden_dropout=0.0)
    return torch.nn.ModuleDict(
        {
            "layer": layer,
            "cross": te.MultiheadAttention(32, 4, device=device, attention_dropout=0.0, attention_type="cross"),
            "linear": linear(device),
            "norm_linear": linear(device, te.LayerNormLinear),
        }
    )


def run(parts, device):
    torch.manual_seed(7)
    wide, narrow = randn(6, 2, 32, device=device), randn(6, 2, 24, device=device)
    return (
        parts["layer"](wide),
        parts["cross"](wide, encoder_output=wide),
        parts["linear"](narrow),
        parts["norm_linear"](narrow),
    )


def units(module):
    return [unit for part in module.modules() if hasattr(part, "row_units") for unit in part.row_units()]


def joins_without_copy(module):
    with Ran() as ran:
        for unit in units(module):
            te.functional.noop_cat(unit.parameters)
    return "cat" not in ran.names and all(unit.in_order() for unit in units(module))


def in_one_buffer(parameters, align=64):
    """A data-parallel owner that knows nothing of units: parameters in the given order, padding between."""
    starts, end = [], 0
    for p in parameters:
        starts.append(end)
        end += -(-p.numel() // align) * align
    buffer = parameters[0].new_zeros(end)
    for p, start in zip(parameters, starts, strict=True):
        p.data = buffer[start : start + p.numel()].view(p.shape).copy_(p.data)
    return buffer


def example(name):
    """A function of the user page's example."""
    namespace = {}
    exec(EXAMPLE.group(1), namespace)
    return namespace[name]


def addresses(module):
    return {name: (p.data_ptr(), p.dtype, p.device) for name, p in module.named_parameters()}


OWNERS = {
    "reverse": lambda parameters: in_one_buffer(parameters[::-1]),
    "forward": in_one_buffer,
    "unit-wise": lambda parameters: example("in_one_buffer")(parameters[::-1]),
    "one each": lambda parameters: [in_one_buffer([p], align=1) for p in parameters],
}


# ---- who moves them ----


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
    assert joins_without_copy(loaded) == (owner != "reverse")  # the owner's memory comes whole, with whom it serves
    assert joins_without_copy(loaded.double())


def test_one_part_that_moves_comes_back_to_its_unit(device):
    """Unless the others lie in an owner's memory."""
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


def test_the_bias_that_there_is_none_of_goes_along(device):
    module = te.Linear(24, 32, parameters_split=SPLIT, bias=False, device="meta")
    assert module.q_bias.is_meta
    module.load_state_dict(
        te.Linear(24, 32, parameters_split=SPLIT, bias=False, device=device).state_dict(), assign=True
    )
    assert module.q_bias.device.type == torch.device(device).type and module.q_bias.numel() == 0
    assert module.bfloat16().k_bias.dtype == torch.bfloat16


# ---- what joining costs ----


def test_an_owner_that_keeps_units_costs_no_copy(device):
    """It walks over the parameters in reverse, and knows of units by the marks alone."""
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
    """Sorting an owner's buffer where it lies: no value is written over before it is read, and a backward that would
    read what was is told."""
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
    """Rows with gaps reach further than their bytes. Mutant: one.nbytes in place of the storage's in _overlap."""
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
