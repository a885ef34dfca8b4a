"""Clients' own submodules, adapters and hooks in TransformerLayer and MultiheadAttention: they are called as the API
describes a submodule, and their results are used; keywords of ours reach no other class."""

import copy

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.module.submodules import is_own
from transformer_engine.pytorch.probe.one_run import recording

from .modules import build

HIDDEN, FFN, HEADS = 16, 32, 2
NO_DROPOUT = {"hidden_dropout": 0.0, "attention_dropout": 0.0}


def layer(device, **options):
    torch.manual_seed(3)
    made = te.TransformerLayer(HIDDEN, FFN, HEADS, device=device, **NO_DROPOUT, **options)
    with torch.no_grad():
        for p in made.parameters():
            p.add_(torch.randn(p.shape).to(p) * 0.3)
    return made


def tokens(device):
    return torch.randn(5, 2, HIDDEN, device=device, requires_grad=True)


class Mlp(torch.nn.Module):
    """A client's, by the API's signature; `kind`: what it returns."""

    def __init__(self, kind, device):
        super().__init__()
        self.linear, self.kind = torch.nn.Linear(HIDDEN, HIDDEN, device=device), kind
        self.bias = torch.nn.Parameter(torch.randn(HIDDEN, device=device))

    def forward(self, inp, is_first_microbatch=None):
        y = self.linear(inp)
        return {
            "tensor": y,
            "(tensor,)": (y,),
            "(tensor, None)": (y, None),
            "(tensor, bias)": (y, self.bias),
            "[tensor, bias]": [y, self.bias],
        }[self.kind]

    def added(self, inp):
        return self.linear(inp) + (self.bias if "bias" in self.kind else 0)


KINDS = ["tensor", "(tensor,)", "(tensor, None)", "(tensor, bias)", "[tensor, bias]"]


def close(got, wanted):
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_of_the_clients(device, kind):
    made, x = layer(device), tokens(device)
    made.layernorm_mlp = mlp = Mlp(kind, device)
    h = x + made.self_attention(x)
    want = h + mlp.added(h)
    y = made(x)
    close(y, want)
    ours = torch.autograd.grad(y.square().sum(), [x, *made.parameters()], allow_unused=True)
    plain = torch.autograd.grad(want.square().sum(), [x, *made.parameters()], allow_unused=True)
    for got, wanted in zip(ours, plain, strict=True):
        if wanted is not None or got is not None:
            torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_an_mlp_beside_the_attention_and_in_a_decoder(device, kind):
    made, x = layer(device, parallel_attention_mlp=True), tokens(device)
    made.layernorm_mlp = mlp = Mlp(kind, device)
    close(made(x), x + made.self_attention(x) + mlp.added(x))
    made, encoded = layer(device, layer_type="decoder"), tokens(device)
    made.layernorm_mlp = mlp = Mlp(kind, device)
    h = x + made.self_attention(x)
    h = h + made.inter_attention(h, encoder_output=encoded, attn_mask_type="no_mask")
    close(made(x, encoder_output=encoded), h + mlp.added(h))


class Attention(torch.nn.Module):
    """A client's: takes what the API has, and looks at nothing."""

    def __init__(self, results):
        super().__init__()
        self.results = results

    def forward(self, hidden_states, attention_mask=None, encoder_output=None, **options):
        assert not set(options) - API_OPTIONS, options
        return self.results(hidden_states * 0.5)


API_OPTIONS = {
    "attn_mask_type", "window_size", "bottom_right_diagonal", "is_first_microbatch", "checkpoint_core_attention",
    "inference_params", "rotary_pos_emb", "core_attention_bias_type", "core_attention_bias", "alibi_slopes",
    "cu_seqlens_q", "cu_seqlens_kv", "max_seqlen_q", "max_seqlen_kv", "fast_zero_fill", "pad_between_seqs", "softcap",
}  # fmt: skip


@pytest.mark.parametrize("options", [{}, {"output_layernorm": True}, {"parallel_attention_mlp": True}], ids=str)
@pytest.mark.parametrize("biased", [False, True])
def test_an_attention_of_the_clients(device, options, biased):
    made, x, bias = layer(device, **options), tokens(device), torch.randn(HIDDEN, device=device)
    made.self_attention = Attention(lambda y: (y, bias) if biased else (y, None))
    attended = x * 0.5 + (bias if biased else 0)
    mlp = made.layernorm_mlp
    if "parallel_attention_mlp" in options:
        want = x + attended + mlp(x)
    else:
        want = x + attended + mlp(x + attended)
    close(made(x), made.layernorm(want) if "output_layernorm" in options else want)


def test_a_norms_output_of_the_clients(device):
    """apply_residual_connection_post_layernorm: the residual branch goes on from the submodule's second result."""
    made, x = layer(device, apply_residual_connection_post_layernorm=True), tokens(device)
    bias = torch.randn(HIDDEN, device=device)
    for results in (lambda y: (y, y * 3), lambda y: (y, None, y * 3), lambda y: (y, bias, y * 3)):
        made.self_attention = Attention(results)
        attended = x * 0.5 + (bias if len(results(x)) == 3 and results(x)[1] is not None else 0)
        h = x * 1.5 + attended
        mlp, norm_output = made.layernorm_mlp(h)
        close(made(x), norm_output + mlp)
    made.self_attention = Attention(lambda y: y)
    with refused(TypeError, "'self_attention' is a Attention", "followed by the norm's output"):
        made(x)


@pytest.mark.parametrize("biased", [False, True])
def test_our_own_mlp_as_other_layers_build_it(device, biased):
    made, x = layer(device), tokens(device)
    made.layernorm_mlp = mlp = te.LayerNormMLP(HIDDEN, 64, return_bias=biased, device=device)
    torch.nn.init.normal_(mlp.fc2_bias)
    h = x + made.self_attention(x)
    result = mlp(h)
    close(made(x), h + (sum(result) if biased else result))
    made.self_attention = attention = te.MultiheadAttention(
        HIDDEN, HEADS, return_bias=True, input_layernorm=True, device=device, attention_dropout=0.0
    )
    torch.nn.init.normal_(attention.proj.bias)
    h = x + sum(attention(x))
    close(made(x), h + (sum(mlp(h)) if biased else mlp(h)))
    made.self_attention = attention = te.MultiheadAttention(HIDDEN, HEADS, device=device, attention_dropout=0.0)
    h = x + attention(x)  # without a norm
    close(made(x), h + (sum(mlp(h)) if biased else mlp(h)))


class Subclass(te.LayerNormMLP):
    """With the API's signature alone, and work of its own."""

    def forward(self, inp, is_first_microbatch=None):
        return super().forward(inp, is_first_microbatch) * 2


class Called(te.LayerNormMLP):
    def __call__(self, inp, is_first_microbatch=None):
        return super().__call__(inp, is_first_microbatch) * 2


@pytest.mark.parametrize("kind", [Subclass, Called])
def test_a_subclass_with_the_apis_signature(device, kind):
    made, x = layer(device), tokens(device)
    made.layernorm_mlp = mlp = kind(HIDDEN, FFN, device=device)
    h = x + made.self_attention(x)
    close(made(x), h + te.LayerNormMLP.forward(mlp, h) * 2)


class Wrapped(torch.nn.Module):
    """An adapter around a module, as LoRA is."""

    def __init__(self, base, wide, width, device):
        super().__init__()
        self.base, self.delta = base, torch.nn.Linear(wide, width, device=device)

    def forward(self, x, *args, **options):
        return self.base(x, *args, **options) + self.delta(x)


def test_adapters_around_projections(device):
    """The same as weights that have the adapter's product in them, where no norm is in between."""
    made, x = layer(device), tokens(device)
    want = made(x)
    for path, wide, width in (
        ("self_attention.layernorm_qkv", HIDDEN, 3 * HIDDEN),
        ("self_attention.proj", HIDDEN, HIDDEN),
        ("layernorm_mlp", HIDDEN, HIDDEN),
    ):
        parent = made.get_submodule(path.rpartition(".")[0])
        wrapped = Wrapped(made.get_submodule(path), wide, width, device)
        torch.nn.init.zeros_(wrapped.delta.weight)
        torch.nn.init.zeros_(wrapped.delta.bias)
        setattr(parent, path.rpartition(".")[2], wrapped)
        close(made(x), want)
    torch.nn.init.normal_(wrapped.delta.bias)
    y = made(x)
    close(y, want + wrapped.delta.bias)
    y.sum().backward()
    assert all(p.grad is not None for name, p in made.named_parameters())


@pytest.mark.parametrize("attention_type", ["self", "cross"])
@pytest.mark.parametrize("input_layernorm", [False, True])
def test_projections_with_a_bias_beside(device, attention_type, input_layernorm):
    """(tensor, bias) of any projection, which the attention then adds."""
    torch.manual_seed(4)
    made = te.MultiheadAttention(
        HIDDEN,
        HEADS,
        attention_type=attention_type,
        input_layernorm=input_layernorm,
        device=device,
        attention_dropout=0.0,
    )
    for p in made.parameters():
        torch.nn.init.normal_(p, std=0.3)
    x = tokens(device)
    encoded = {"encoder_output": tokens(device)} if attention_type == "cross" else {}
    want = made(x, **encoded)
    for part in made.children():
        if isinstance(part, (te.Linear, te.LayerNormLinear)):
            part.return_bias, part.apply_bias = True, False
    if attention_type == "self":
        part = made.layernorm_qkv if input_layernorm else made.qkv
        assert isinstance(part(x), tuple)

    class Joins(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, *args, **options):
            out, bias = self.base(*args, **options)
            return out, bias

    for name, part in list(made.named_children()):
        if isinstance(part, (te.Linear, te.LayerNormLinear)):
            setattr(made, name, Joins(part))
    close(made(x, **encoded), want)


# ---- hooks ----


def test_hooks_see_the_calls_of_the_api(device):
    made, x = layer(device), tokens(device)
    want, seen = made(x), {}

    def note(name):
        def hook(module, args, kwargs, output):
            seen[name] = args, kwargs, output

        return hook

    names = ("self_attention", "self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp")
    handles = [made.get_submodule(n).register_forward_hook(note(n), with_kwargs=True) for n in names]
    close(made(x), want)
    for name, (_, kwargs, output) in seen.items():
        assert isinstance(output, torch.Tensor), name
        assert not {"residual", "return_input"} & set(kwargs), name
    h = x + seen["self_attention"][2]
    close(seen["layernorm_mlp"][0][0], h)
    for handle in handles:
        handle.remove()
    handles = [made.get_submodule(n).register_full_backward_hook(lambda *_: None) for n in names]
    close(made(x), want)
    assert len(handles) == len(names)


@pytest.mark.parametrize(
    "path", ["self_attention", "self_attention.layernorm_qkv", "self_attention.proj", "layernorm_mlp"]
)
def test_a_hook_that_doubles_the_output(device, path):
    made, x = layer(device), tokens(device)
    other = copy.deepcopy(made)
    made.get_submodule(path).register_forward_hook(lambda module, args, output: output * 2)
    with torch.no_grad():  # the same by hand: twice the weights of its last product
        part = other.get_submodule(path)
        last = {"self_attention": "proj.weight proj.bias", "layernorm_mlp": "fc2_weight fc2_bias"}.get(path)
        doubled = last.split() if last else [n for n, _ in part.named_parameters() if "layer_norm" not in n]
        for name in doubled:
            part.get_parameter(name).mul_(2)
    close(made(x), other(x))


def test_hooks_of_all_modules(device):
    """torch's global hooks are hooks too."""
    made, x, seen = layer(device), tokens(device), []
    want = made(x)
    handle = torch.nn.modules.module.register_module_forward_hook(lambda m, args, output: seen.append((m, output)))
    try:
        close(made(x), want)
    finally:
        handle.remove()
    assert made.layernorm_mlp in [m for m, _ in seen]
    assert all(isinstance(output, torch.Tensor) for _, output in seen)


def test_a_forward_that_a_client_wraps(device):
    """As accelerate's hooks do: another function in forward's place."""
    made, x = layer(device), tokens(device)
    want, mlp = made(x), made.layernorm_mlp
    inner, calls = mlp.forward, []

    def forward(*args, **kwargs):
        calls.append(kwargs)
        return inner(*args, **kwargs)

    mlp.forward = forward
    close(made(x), want)
    assert calls == [{"is_first_microbatch": None}]


def test_probes_change_no_path(device):
    """te.memory_plan hooks every module; its report is that of a run without the hooks."""
    made = layer(device)
    with recording("te.memory_plan", made):
        assert is_own(made.layernorm_mlp, te.LayerNormMLP)
    made.layernorm_mlp.register_forward_hook(lambda *_: None)
    assert not is_own(made.layernorm_mlp, te.LayerNormMLP)


# ---- what no contract has ----


BAD = {
    "a dict": lambda y: {"out": y},
    "None": lambda y: None,
    "()": lambda y: (),
    "attention weights behind": lambda y: (y, y.new_ones(2, 2, 5, 5)),
    "a norm's output that was not asked for": lambda y: (y, y),
    "three": lambda y: (y, None, y),
    "a bias of another size": lambda y: (y, y.new_ones(3)),
    "another shape": lambda y: y[:1],
    "another width": lambda y: y[..., :1],
    "a number": lambda y: 3.0,
}


class Returns(torch.nn.Module):
    def __init__(self, base, change):
        super().__init__()
        self.base, self.change = base, change

    def forward(self, *args, **options):
        return self.change(self.base(*args, **options))


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize(
    "path",
    [
        "self_attention",
        "layernorm_mlp",
        "self_attention.layernorm_qkv",
        "self_attention.proj",
        "self_attention.core_attention",
    ],
)
def test_what_no_contract_has_is_named(device, path, what):
    if what == "another shape" and path.count("."):
        pytest.skip("the number of tokens of a projection depends on the ranks")
    made, x = layer(device), tokens(device)
    parent, _, name = path.rpartition(".")
    setattr(made.get_submodule(parent), name, Returns(made.get_submodule(path), BAD[what]))
    op = "MultiheadAttention" if parent else "TransformerLayer"
    with refused(TypeError, op, f"'{name}' is a Returns", "returned", "wanted a tensor"):
        made(x)


def test_compiled_with_a_client_inside(device):
    made, x = layer(device), tokens(device)
    made.layernorm_mlp = Mlp("(tensor, bias)", device)
    want = made(x)
    close(torch.compile(made, fullgraph=True, backend="aot_eager")(x), want)
    plain = layer(device)
    assert_same_bits(torch.compile(plain, fullgraph=True, backend="aot_eager")(x).detach(), plain(x).detach())


def test_layers_as_built_keep_their_shortcuts(device):
    """The sum before the MLP is part of its norm: one addition of tokens is left, the last; attention may add masks."""
    x, names, todo, seen = torch.randn(6, 2, 32, device=device, requires_grad=True), [], [], set()
    todo.append(build("TransformerLayer", device)(x).grad_fn)
    while todo:
        node = todo.pop()
        if node is not None and node not in seen:
            seen.add(node)
            names += [node.name()] * (list(node._input_metadata[0].shape) == [6, 2, 32])
            todo += [following for following, _ in node.next_functions]
    assert sum("Add" in name for name in names) == 1, names
