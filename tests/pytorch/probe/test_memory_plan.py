# te.memory_plan: its rows equal the tensors of saved-tensor hooks, to the byte, with correct names; it changes nothing.
import pytest
import torch
from plain_modules import angles
from support import assert_same_bits, randn, refused, saved_tensors

import transformer_engine.pytorch as te

HIDDEN, FFN, TOKENS = 32, 56, (6, 2)


def mlp(**options):
    return te.LayerNormMLP(HIDDEN, FFN, activation="swiglu", normalization="RMSNorm", bias=False, **options)


def layer(**options):
    return te.TransformerLayer(HIDDEN, FFN, 4, 2, activation="swiglu", hidden_dropout=0.1, **options)


MODULES = {
    "linear": lambda **o: te.Linear(HIDDEN, 24, **o),
    "split": lambda **o: te.Linear(HIDDEN, 24, parameters_split=["a", "b"], **o),
    "norm_linear": lambda **o: te.LayerNormLinear(HIDDEN, 24, **o),
    "norm": lambda **o: te.LayerNorm(HIDDEN, **o),
    "mlp": mlp,
    "recomputed": lambda **o: mlp(checkpoint=True, **o),
    "norm_recomputed": lambda **o: mlp(recompute_norm_output=True, **o),
    "layer": layer,
    "sequence": lambda **o: torch.nn.Sequential(te.Linear(HIDDEN, HIDDEN, **o), torch.nn.GELU(), mlp(**o)),
}


def hooked_bytes(module, *sample):
    """The definition of the target, measured by hooks of the test: distinct storages, without parameters and the
    input."""
    with saved_tensors() as kept:
        out = module(*sample)
    own = {t.untyped_storage().data_ptr() for t in (*module.parameters(), *sample)}
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in kept if t.numel()}
    del out
    return sum(size for pointer, size in storages.items() if pointer not in own)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_equals_the_hooks(device, name, frozen):
    module = MODULES[name](device=device, params_dtype=torch.bfloat16).eval()
    if frozen:
        module.requires_grad_(False)
    x = randn(*TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    plan = te.memory_plan(module, x)
    assert plan.kept_bytes == hooked_bytes(module, x)
    kinds = {row.status for row in plan.rows}
    assert kinds <= {"kept", "recomputed", "parameter", "input"}
    names = dict(module.named_parameters())
    for row in plan.rows:
        if row.status == "parameter":
            assert all(part in names for part in row.name.split(" + ")), row
    assert all(row.why and row.recompute for row in plan.rows)
    assert f"kept {plan.kept_bytes:,} B" in str(plan)


def test_case_14_to_the_byte(device):
    """RMSNorm SwiGLU MLP: norm output and pre-activation, and four bytes a row; less with recomputation."""
    rows, size = TOKENS[0] * TOKENS[1], 2
    x = randn(*TOKENS, HIDDEN, dtype=torch.bfloat16, device=device, requires_grad=True)
    built = {name: MODULES[name](device=device, params_dtype=torch.bfloat16) for name in MODULES}
    statistic, norm_output, gate_up = rows * 4, rows * HIDDEN * size, rows * 2 * FFN * size
    assert te.memory_plan(built["mlp"], x).kept_bytes == statistic + norm_output + gate_up
    assert te.memory_plan(built["norm_recomputed"], x).kept_bytes == statistic + gate_up
    assert te.memory_plan(built["recomputed"], x).kept_bytes == 0


def test_what_is_recomputed_is_listed_with_its_price(device):
    x = randn(*TOKENS, HIDDEN, device=device, requires_grad=True)

    def recomputed(name):
        plan = te.memory_plan(MODULES[name](device=device), x)
        return {row.name: row for row in plan.rows if row.status == "recomputed"}

    assert set(recomputed("mlp")) == {"activation"}
    assert set(recomputed("norm_recomputed")) == {"activation", "norm output"}
    rows = recomputed("recomputed")
    assert set(rows) == {"norm output", "pre-activation"}
    assert rows["pre-activation"].bytes == 2 * FFN * TOKENS[0] * TOKENS[1] * 4
    assert "checkpoint=True" in rows["pre-activation"].recompute


def test_names_say_which_module(device):
    module = layer(device=device)
    x = randn(*TOKENS, HIDDEN, device=device, requires_grad=True)
    freqs = angles(TOKENS[0], HIDDEN // 4).to(device)
    plan = te.memory_plan(module, x, rotary_pos_emb=freqs)
    found = {(row.module, row.name): row for row in plan.rows}
    assert found["layernorm_mlp", "pre-activation"].status == "kept"
    assert found["self_attention.layernorm_qkv", "norm input"].status == "input"
    assert found["layernorm_mlp", "layernorm_mlp.fc1_weight"].status == "parameter"
    assert [row.status for row in plan.rows if row.name == "rotary angles"] == ["input"]
    attention = [row for row in plan.rows if row.module.endswith("core_attention") and row.status == "kept"]
    assert attention and all("checkpoint_core_attention=True" in row.recompute for row in attention)


@pytest.mark.parametrize("name", MODULES)
def test_the_meta_device_has_the_same_plan(name):
    """Storages on the meta device have no distinct addresses."""

    def plan(device):
        module = MODULES[name](device=device)
        return [
            (row.module, row.op, row.name, row.shape, row.bytes, row.status)
            for row in te.memory_plan(module, torch.randn(*TOKENS, HIDDEN, device=device, requires_grad=True)).rows
        ]

    assert plan("meta") == plan("cpu")


def test_names_survive_memory_that_is_used_again():
    """A saved tensor at the address of an earlier one that was recorded and freed."""

    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = te.RMSNorm(HIDDEN, device="cpu"), te.Linear(HIDDEN, HIDDEN, device="cpu")

        def forward(self, x):
            for _ in range(20):
                self.norm(x * 2)
            return self.linear(x * 3)

    plan = te.memory_plan(Drops(), randn(64, HIDDEN, requires_grad=True))
    assert [row.name for row in plan.rows if row.status == "kept"] == ["linear input"]


def test_graphs_that_the_forward_drops_are_not_kept():
    class Drops(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.mlp = mlp(device="cpu")

        def forward(self, x):
            for _ in range(20):
                self.mlp(x)
            return Result(self.mlp(x))

    class Result:  # no contents that can be inspected
        def __init__(self, y):
            self.y = y

    module, x = Drops(), randn(*TOKENS, HIDDEN, requires_grad=True)
    assert te.memory_plan(module, x).kept_bytes == hooked_bytes(module.mlp, x) > 0


@pytest.mark.parametrize("delay", [False, True])
def test_main_grad_need_not_be_there(delay, device):
    x = randn(*TOKENS, HIDDEN, device=device, requires_grad=True)
    module = mlp(fuse_wgrad_accumulation=True, delay_wgrad_compute=delay, device=device)
    plan = te.memory_plan(module, x)
    assert module.fuse_wgrad_accumulation and module.need_backward_dw() is delay
    for p in module.parameters():
        p.main_grad = torch.zeros(p.shape, device=device)
    assert plan.kept_bytes == hooked_bytes(module, x)


LAYOUTS = {
    torch.sparse_coo: ("indices", "values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
}


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_sparse_tensors_are_listed_by_their_parts(layout):
    class Product(torch.nn.Module):
        def __init__(self, matrix):
            super().__init__()
            self.register_buffer("matrix", matrix)

        def forward(self, x):
            return torch.sparse.mm(self.matrix, x)

    matrix = torch.eye(4).to_sparse(layout=layout)  # of COO tensors a coalesced one
    plan = te.memory_plan(Product(matrix), randn(4, 3, requires_grad=True))
    sizes = [part.untyped_storage().nbytes() for part in (getattr(matrix, name)() for name in LAYOUTS[layout])]
    rows = [row for row in plan.rows if row.name == "matrix"]
    assert {row.status for row in rows} == {"parameter"} and plan.bytes_of("parameter") == sum(sizes)
    assert plan.kept_bytes == 0


def test_a_layout_whose_storages_are_not_known_is_named():
    with refused(NotImplementedError, "memory_plan", "[4, 3]", "mkldnn", "strided and sparse"):
        te.memory_plan(torch.nn.Identity(), torch.ones(4, 3).to_mkldnn())


def test_nothing_changes(device):
    module = layer(device=device).train()
    x = randn(*TOKENS, HIDDEN, device=device, requires_grad=True)
    torch.manual_seed(5)
    wanted = module(x)
    torch.manual_seed(5)
    te.memory_plan(module, x)
    te.explain(module, x)
    assert_same_bits(module(x), wanted)
    assert x.grad is None and all(p.grad is None for p in module.parameters())
    assert not module._forward_hooks and not module._forward_pre_hooks


def test_an_error_inside_leaves_nothing_behind(device):
    module = mlp(device=device)
    x = randn(*TOKENS, HIDDEN, device=device, requires_grad=True)
    for probe in (te.memory_plan, te.explain):
        with refused(ValueError, "LayerNormMLP", "'inp'", "wanted 32"):
            probe(module, x[..., :-1])
    assert not module._forward_hooks and not module._forward_pre_hooks
    assert te.memory_plan(module, x).kept_bytes == hooked_bytes(module, x)


@pytest.mark.parametrize(
    "options, bytes_beside, scaled",
    [
        ({"master_weights": True}, 12, 0),
        ({"master_weights": True, "store_param_remainders": True}, 10, 0),
        ({"master_weights": True, "exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16}, 8, 2),
    ],
    ids=str,
)
def test_the_optimizers_state_is_listed_when_asked(device, options, bytes_beside, scaled):
    """Each storage once; also the scales of FusedAdam's states, 8 bytes each."""
    module, x = mlp(device=device, params_dtype=torch.bfloat16), randn(*TOKENS, HIDDEN, device=device).bfloat16()
    optimizer = te.optimizers.FusedAdam(module.parameters(), **options)
    assert te.memory_plan(module, x, optimizer=optimizer).bytes_of("optimizer") == 0
    module(x).sum().backward()
    optimizer.step()
    plan, without = te.memory_plan(module, x, optimizer=optimizer), te.memory_plan(module, x)
    parameters = list(module.parameters())
    assert plan.bytes_of("optimizer") == sum(bytes_beside * p.numel() + 8 * scaled for p in parameters)
    assert plan.rows[: len(without.rows)] == without.rows and plan.kept_bytes == without.kept_bytes
    assert "fc1_weight: exp_avg" in [row.name for row in plan.rows] and "optimizer " in str(plan)


def test_any_optimizer_of_torchs(device):
    module, x = te.Linear(8, 4, device=device), randn(2, 8, device=device)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1, momentum=0.9)
    module(x).sum().backward()
    optimizer.step()
    rows = [row for row in te.memory_plan(module, x, optimizer=optimizer).rows if row.status == "optimizer"]
    assert sorted(row.name for row in rows) == ["bias: momentum_buffer", "weight: momentum_buffer"]
    with refused(TypeError, "memory_plan", "'optimizer'", "list"):
        te.memory_plan(module, x, optimizer=[])


def test_bad_modules_are_named():
    for probe in (te.memory_plan, te.explain):
        with refused(TypeError, probe.__name__, "'module'", "function", "torch.nn.Module"):
            probe(test_bad_modules_are_named, torch.zeros(2))
        compiled = torch.compile(torch.nn.Linear(2, 2), backend="eager")
        with refused(TypeError, probe.__name__, "not compiled", "torch.compile"):
            probe(compiled, torch.zeros(2, 2))
    with refused(TypeError, "explain", "ReLU", "te.explain(module, *sample)"):
        te.explain(torch.nn.ReLU())
