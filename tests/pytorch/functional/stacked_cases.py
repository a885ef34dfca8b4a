# Cases of weights of groups as one tensor [groups, N, K], beside the list of its matrices.
import pytest
import torch
from fp8_products import RECIPES, product
from support import assert_same_bits, randn

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import grouped_mlp, grouped_offsets

BF16 = torch.bfloat16
SPLITS = [5, 0, 130, 1]
GROUPS, TOTAL, SPARE, K, HIDDEN = len(SPLITS), sum(SPLITS), 4, 64, 48
HOST_OR_DEVICE = pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
KINDS = ("none", *RECIPES)
LEAVES = ("x", "scale", "first", "second")


def quantizations(recipe, device):
    """Of both products; of delayed scaling one for each group, with a state of its own."""
    if recipe == "none":
        return (), ()
    each = GROUPS if recipe == "delayed" else 1
    return tuple([product(recipe, device, scale=2.0 + i).native for _ in range(each)] for i in range(2))


def set_products(name, device):
    """For a fixture: a CPU's products of LibTorch, or those of the engine with its lists, as a GPU has them."""
    if name == "loop" and device != "cpu":
        pytest.skip("a CPU's products")
    before = _C.set_cpu_products(name)
    yield
    _C.set_cpu_products(before)


class Case:
    """Leaves: x, a scale of each row, the weights of both products, each as one tensor or as a list of its slices."""

    def __init__(self, device, on_device, dtype=BF16, features=K, hidden=HIDDEN, wanted=LEAVES):
        self.device, self.on_device = device, on_device
        rows = TOTAL + (SPARE if on_device else 0)
        self.x, self.dy = (randn(rows, features, dtype=dtype, device=device) for _ in range(2))
        self.scale = randn(rows, device=device)
        for t in (self.x, self.dy, self.scale):
            t[TOTAL:] = torch.nan
        shapes = (2 * hidden, features), (features, hidden)
        self.weights = [randn(GROUPS, *shape, dtype=dtype, device=device, scale=0.2) for shape in shapes]
        self.wanted = wanted

    def groups(self):
        if not self.on_device:
            return {"splits": SPLITS, "offsets": None}
        return {"splits": (), "offsets": grouped_offsets(torch.tensor(SPLITS, device=self.device), self.x)}

    def leaves(self, stacked):
        """x, scale, and of each product a leaf or a list of leaves."""

        def leaf(t, name):
            return t.detach().requires_grad_(name in self.wanted)

        weights = [
            leaf(w, name) if whole else [leaf(part, name) for part in w]
            for w, name, whole in zip(self.weights, ("first", "second"), stacked, strict=True)
        ]
        return leaf(self.x, "x"), leaf(self.scale, "scale"), *weights

    def call(self, leaves, **options):
        x, scale, *weights = leaves
        groups = self.groups()
        return grouped_mlp(x, groups.pop("offsets"), *weights, scale, **groups, **options)

    def results(self, stacked=(True, True), **options):
        """The output and the wanted gradients, those of a list stacked."""
        leaves = self.leaves(stacked)
        y = self.call(leaves, **options)
        y.backward(self.dy)
        return [y.detach(), *(gradient(leaf) for leaf in leaves if gradient(leaf) is not None)]


def gradient(leaf):
    if isinstance(leaf, torch.Tensor):
        return leaf.grad
    return None if leaf[0].grad is None else torch.stack([part.grad for part in leaf])


def assert_all_same(got, want):
    assert len(got) == len(want) > 1
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, i)
