# Seams of the layer, each shown by a client of tests/layer: a chain of two grouped layers, a prologue and an epilogue
# with tensors of their own in a chain, and a GEMM that does not add the bias. The oracle
# of a chain is its layers done separately, to the bit.
# Mutant: plan_recompute (prepare_operand.cpp) having the prologue quantize where groups are quantized.
import pytest
import torch
from support import assert_same_bits, randn, wide

from transformer_engine.common import recipe
from transformer_engine.pytorch import _C, functional
from transformer_engine.pytorch.quantization.recipes.products import plan_of

from ..module.grouped_cases import as_a_loop
from .policies import policy

RECIPES = {
    "none": None,
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
    "high precision": recipe.Float8BlockScaling(backward_override="high_precision"),
    "dequantized": recipe.Float8CurrentScaling(backward_override="dequantized"),
}
SPLITS = [5, 0, 130, 1]
GROUPS, ROWS, K, N = len(SPLITS), sum(SPLITS), 64, 96


def delayed(device):
    """A quantization with a state of its own; a step may change the scales of its input."""

    def quantizer(scale, e5m2=False):
        state = torch.tensor([scale], device=device), torch.zeros(1, device=device)
        return _C.Quantizer("delayed", e5m2=e5m2, scale=state[0], amax=state[1])

    return _C.ProductQuantization(quantizer(8.0), quantizer(16.0), quantizer(32.0, True), False, True, True)


def quantizations(kind, device, count):
    """Of both layers: those of each group, or none."""
    if kind == "none":
        return [[], []]
    if kind == "delayed":
        return [[delayed(device) for _ in range(count)] for _ in range(2)]
    return [[plan_of(RECIPES[kind]).quantization] * count for _ in range(2)]


def gradients(y, leaves, dy):
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    return [y, *torch.autograd.grad(y, wanted, dy)]


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", [*RECIPES, "delayed"])
@pytest.mark.parametrize("activation", ["", "gelu", "swiglu"])
@pytest.mark.parametrize("on_device", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_two_grouped_layers_are_a_chain(kind, activation, on_device, bias, recompute, device):
    if on_device and kind == "none" and device == "cpu":
        pytest.skip("grouped_linear reads the offsets that a CPU holds, and has groups of the host")
    hidden = N // 2 if activation == "swiglu" else N
    x, dy = randn(ROWS, K, dtype=torch.bfloat16, device=device), randn(ROWS, K, dtype=torch.bfloat16, device=device)
    x.requires_grad_()
    weights = [
        [randn(*shape, dtype=torch.bfloat16, device=device, scale=0.2, requires_grad=True) for _ in SPLITS]
        for shape in ((N, K), (K, hidden))
    ]
    biases = [
        [randn(n, dtype=torch.bfloat16, device=device, requires_grad=True) for _ in SPLITS] if bias else []
        for n in (N, K)
    ]
    offsets = functional.grouped_offsets(torch.tensor(SPLITS, device=device), x) if on_device else None
    splits = [] if on_device else SPLITS
    leaves = [x, *weights[0], *biases[0], *weights[1], *biases[1]]

    one, two = quantizations(kind, device, GROUPS)
    with as_a_loop(kind):  # as a chain's list is
        y = functional.grouped_linear(x, weights[0], biases[0], splits=splits, offsets=offsets, quantizations=one)
        h = functional.activation(y, activation) if activation else y
        y = functional.grouped_linear(h, weights[1], biases[1], splits=splits, offsets=offsets, quantizations=two)
    separate = gradients(y, leaves, dy)

    both = quantizations(kind, device, GROUPS)
    y = policy("grouped_chain").run(x, weights, biases, splits, offsets, both, activation, recompute)
    for quantization in (q for layer in both for q in layer if kind == "delayed"):
        policy("grouped_chain").scale_input(quantization, 2.0)
    chain = gradients(y, leaves, dy)
    for ours, theirs in zip(chain, separate, strict=True):
        assert_same_bits(ours, theirs)
    # E5M2 rounds a gradient by 1/8 at most, E4M3 each operand by 1/16, and two products follow each other.
    check_against_float64(chain, leaves, dy, activation, 0.01 if kind == "none" else 0.2)


def check_against_float64(results, leaves, dy, activation, most):
    """Relative to the norm of each: bf16 rounds each of the four products' operands by 2^-9, E4M3 and E5M2 by 2^-4 and
    2^-3 at most, and independent errors add up by their squares."""
    copies = [wide(leaf).requires_grad_() for leaf in leaves]
    x, rest = copies[0], copies[1:]
    has_bias = len(rest) == 4 * GROUPS
    layers = [rest[: len(rest) // 2], rest[len(rest) // 2 :]]
    for i, layer in enumerate(layers):
        parts = []
        for g, rows in enumerate(x.split(SPLITS)):
            part = rows @ layer[g].T
            parts.append(part + layer[GROUPS + g] if has_bias else part)
        x = torch.cat(parts)
        if i == 0 and activation == "gelu":
            x = torch.nn.functional.gelu(x, approximate="tanh")
        if i == 0 and activation == "swiglu":
            a, b = x.chunk(2, -1)
            x = torch.nn.functional.silu(a) * b
    wanted = gradients(x, copies, wide(dy))
    for ours, reference in zip(results, wanted, strict=True):
        assert (wide(ours) - reference).norm() <= most * reference.norm()


# ---- tensors of a prologue's and of an epilogue's own ----

OWN = ("none", "current", "block")


def own_leaves(device, frozen=()):
    shapes = {
        "x": (ROWS, K),
        "weight1": (N, K),
        "weight2": (K, N),
        "bias1": (N,),
        "bias2": (K,),
        "added1": (ROWS, N),
        "added2": (ROWS, K),
        "scale": (ROWS, 1),
    }
    return {name: randn(*shape, device=device, requires_grad=name not in frozen) for name, shape in shapes.items()}


def separate_layers(leaves, kind, device, names, biases_apart=False):
    def quantization():
        return None if kind == "none" else plan_of(RECIPES[kind]).quantization

    def linear(x, i):
        bias = leaves[f"bias{i}"]
        own = None if biases_apart else bias
        y = functional.linear(x, leaves[f"weight{i}"], own, quantization=quantization())
        y = y + bias if biases_apart else y
        return y + leaves[f"added{i}"] if f"added{i}" in names else y

    h = linear(leaves["x"], 1)
    return linear(h * leaves["scale"] if "scale" in names else h, 2)


def own_chain(leaves, kind, names, gemm_adds_bias=True, recompute=False):
    def optional(name):
        return leaves[name] if name in names else None

    return policy("own_tensors").run(
        leaves["x"],
        [leaves["weight1"], leaves["weight2"]],
        [leaves["bias1"], leaves["bias2"]],
        [optional("added1"), optional("added2")],
        optional("scale"),
        None if kind == "none" else plan_of(RECIPES[kind]).quantization,
        gemm_adds_bias,
        recompute,
    )


def assert_chain_is_separate(leaves, kind, device, names, biases_apart=False, recompute=False):
    used = {name for name in leaves if name in names or name not in ("scale", "added1", "added2")}
    wanted = [leaf for name, leaf in leaves.items() if name in used]
    dy = randn(ROWS, K, device=device)
    separate = gradients(separate_layers(leaves, kind, device, names, biases_apart), wanted, dy)
    chain = gradients(own_chain(leaves, kind, names, not biases_apart, recompute), wanted, dy)
    assert len(chain) > 1
    for ours, theirs in zip(chain, separate, strict=True):
        assert_same_bits(ours, theirs)


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("names", [("scale",), ("added1",), ("added2",), ("added1", "added2", "scale")], ids=" ".join)
def test_tensors_of_their_own(names, kind, recompute, device):
    assert_chain_is_separate(own_leaves(device), kind, device, names, recompute=recompute)


@pytest.mark.parametrize("kind", OWN)
@pytest.mark.parametrize("wanted", ["scale", "added1", "added2", "x", "weight1"])
def test_only_one_needs_a_gradient(wanted, kind, device):
    names = ("added1", "added2", "scale")
    frozen = {"x", "weight1", "weight2", "bias1", "bias2", *names} - {wanted}
    assert_chain_is_separate(own_leaves(device, frozen), kind, device, names)


@pytest.mark.parametrize("kind", OWN)
def test_a_gemm_without_bias_leaves_it_to_the_epilogue(kind, device):
    assert_chain_is_separate(own_leaves(device), kind, device, ("added1",), biases_apart=True)
