# functional.grouped_mlp over rows that a map gathers from tokens: to the bit permute() before it, with rows kept and
# gathered again; what is kept; and maps that do not fit.
import pytest
import torch
from fp8_products import RECIPES, product
from support import assert_same_bits, randn, refused, saved_tensors

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.functional import grouped_mlp, grouped_offsets

TOKENS, TOPK, EXPERTS, K, HIDDEN = 37, 3, 5, 64, 48
BF16 = torch.bfloat16
KINDS = ("none", *RECIPES)


def quantizations(recipe, device):
    """Of both products; of delayed scaling one for each group, with a state of its own."""
    if recipe == "none":
        return (), ()
    each = EXPERTS if recipe == "delayed" else 1
    return tuple([product(recipe, device, scale=2.0 + i).native for _ in range(each)] for i in range(2))


class Case:
    """Leaves x [tokens, K], weights and the probabilities of a choice; dy of the rows, NaN where there is none."""

    def __init__(self, device, dtype=BF16, rows=TOKENS * TOPK + 2, experts=(0, EXPERTS)):
        self.device, self.rows = device, rows
        self.x, self.dy = randn(TOKENS, K, dtype=dtype, device=device), randn(rows, K, dtype=dtype, device=device)
        probs = torch.rand(TOKENS, EXPERTS, device=device)
        probs[::5] = 0  # rows without a token
        chosen = torch.rand(TOKENS, EXPERTS, device=device).topk(TOPK).indices.int()
        made = functional.permute_routing(probs, chosen, experts, rows)
        self.scale, self.token_of_row, self.row_of_pair, offsets, _ = (t.detach() for t in made)
        self.counts = offsets.diff().tolist()
        self.counts += [0] * (EXPERTS - len(self.counts))
        self.dy[sum(self.counts) :] = torch.nan
        self.scale[sum(self.counts) :] = torch.nan
        self.weights = [
            [randn(*shape, dtype=dtype, device=device, scale=0.2, requires_grad=True) for _ in range(EXPERTS)]
            for shape in ((2 * HIDDEN, K), (K, HIDDEN))
        ]
        self.leaves = [self.x.requires_grad_(), self.scale.requires_grad_(), *self.weights[0], *self.weights[1]]

    def groups(self, on_device, x):
        if not on_device:
            return None, self.counts
        return grouped_offsets(torch.tensor(self.counts, device=self.device), x, count=False), ()

    def mapped(self, on_device, quantized=((), ()), only_y=False, **options):
        offsets, splits = self.groups(on_device, self.token_of_row.unsqueeze(1))
        y = grouped_mlp(
            self.x, offsets, *self.weights, self.scale, splits=splits, quantizations=quantized,
            row_map=(self.token_of_row, self.row_of_pair), **options,
        )  # fmt: skip
        return y if only_y else self.gradients(y)

    def permuted(self, on_device, quantized=((), ())):
        x, _ = functional.permute(self.x, self.row_of_pair, self.rows, of_mask=False)
        offsets, splits = self.groups(on_device, x)
        y = grouped_mlp(x, offsets, *self.weights, self.scale, splits=splits, quantizations=quantized)
        return self.gradients(y)

    def gradients(self, y):
        return [y.detach(), *torch.autograd.grad(y, self.leaves, self.dy)]


def assert_same(got, want):
    for i, (a, b) in enumerate(zip(got, want, strict=True)):
        assert_same_bits(a, b, i)


@pytest.mark.parametrize("recipe", KINDS)
def test_a_scale_whose_tail_is_not_read(recipe, device):
    """Its gradient is that of whole scales in live rows; torch's anomaly mode, which looks at all rows, sees zeros."""
    case = Case(device)
    want = case.mapped(True, quantizations(recipe, device))
    got = case.mapped(True, quantizations(recipe, device), zero_scale_tail=False)
    live = sum(case.counts)
    assert live < case.rows and not want[2][live:].any()
    assert_same([*got[:2], got[2][:live], *got[3:]], [*want[:2], want[2][:live], *want[3:]])
    with torch.autograd.set_detect_anomaly(True):
        assert not case.mapped(True, quantizations(recipe, device), zero_scale_tail=False)[2][live:].any()


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("recipe", KINDS)
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_is_permute_before_it(on_device, recipe, keep_rows, device):
    case = Case(device, rows=TOKENS * TOPK + (2 if on_device else 0))
    got = case.mapped(on_device, quantizations(recipe, device), keep_rows=keep_rows)
    assert_same(got, case.permuted(on_device, quantizations(recipe, device)))
    assert all(t.isfinite().all() for t in got)


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("on_device", [False, True], ids=["host", "device"])
def test_dtypes(on_device, dtype, keep_rows, device):
    if dtype is torch.float32 and device == "cuda" and on_device:
        pytest.skip("groups on the device are multiplied in 16 bits")
    case = Case(device, dtype, rows=TOKENS * TOPK)
    assert_same(case.mapped(on_device, keep_rows=keep_rows), case.permuted(on_device))


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("recipe", KINDS)
def test_sums_of_rows(recipe, keep_rows, device):
    """unpermute() after it, which gives rows without a token a gradient of 0."""
    case, dy = Case(device), randn(TOKENS, K, dtype=BF16, device=device)
    results = []
    for sum_rows in (True, False):
        y = case.mapped(True, quantizations(recipe, device), keep_rows=keep_rows, sum_rows=sum_rows, only_y=True)
        y = y if sum_rows else functional.unpermute(y, case.row_of_pair, of_mask=False)
        results.append([y.detach(), *torch.autograd.grad(y, case.leaves, dy)])
    assert_same(*results)


@pytest.mark.parametrize("recipe", ["none", "block"])
def test_rows_that_are_cut(recipe, device):
    """Fewer rows than pairs: the last experts' are not there."""
    case = Case(device, rows=64)
    assert sum(case.counts) == 64
    assert_same(case.mapped(True, quantizations(recipe, device)), case.permuted(True, quantizations(recipe, device)))


@pytest.mark.parametrize("wanted", ["x", "scale", "weights1", "weights2"])
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_only_one_needs_a_gradient(recipe, wanted, device):
    case = Case(device)
    every = case.mapped(True, quantizations(recipe, device))
    place = {"x": [0], "scale": [1], "weights1": range(2, 2 + EXPERTS), "weights2": range(2 + EXPERTS, 2 + 2 * EXPERTS)}
    for i, leaf in enumerate(case.leaves):
        leaf.requires_grad_(i in place[wanted])
    case.leaves = [case.leaves[i] for i in place[wanted]]
    got = case.mapped(True, quantizations(recipe, device))
    assert_same(got, [every[0], *(every[1 + i] for i in place[wanted])])


@pytest.mark.parametrize("recipe", ["none", "current", "block"])
def test_what_is_kept(recipe, device):
    """Tokens and the map, or the rows (in FP8 their panels), beside what the second product keeps."""
    case = Case(device)
    offsets, _ = case.groups(True, case.token_of_row.unsqueeze(1))
    for keep_rows in (False, True):
        with saved_tensors() as saved:
            grouped_mlp(
                case.x, offsets, *case.weights, case.scale, row_map=(case.token_of_row, case.row_of_pair),
                keep_rows=keep_rows, quantizations=quantizations(recipe, device),
            )  # fmt: skip
        of_rows = [t for t in saved if t.shape[0] == case.rows and t.dim() == 2]
        panels = [t for t in saved if t.dim() == 3]
        tokens = [t for t in saved if tuple(t.shape) == (TOKENS, K)]
        maps = [t for t in saved if t.dtype == torch.int32 and t.data_ptr() != offsets.data_ptr()]
        assert sorted(t.shape[1] for t in of_rows) == ([K] * (keep_rows and recipe == "none") + [2 * HIDDEN])
        assert len(panels) == (keep_rows and recipe != "none")
        assert len(tokens) == (not keep_rows)
        shapes = [(TOKENS, TOPK)] if keep_rows else [(case.rows,), (TOKENS, TOPK)]
        assert sorted(tuple(t.shape) for t in maps) == sorted(shapes)


@pytest.mark.parametrize("keep_rows", [False, True])
@pytest.mark.parametrize("recipe", ["none", "block"])
def test_compiled(recipe, keep_rows, device):
    case = Case(device)
    case.dy = randn(TOKENS, K, dtype=BF16, device=device)
    want = case.mapped(True, quantizations(recipe, device), sum_rows=True)
    offsets, _ = case.groups(True, case.token_of_row.unsqueeze(1))
    spec = [] if recipe == "none" else list(product(recipe, device).spec)

    def call(x, scale, weights1, weights2, *row_map):
        return grouped_mlp(
            x, offsets, weights1, weights2, scale, row_map=row_map, keep_rows=keep_rows, sum_rows=True,
            quantizations=(spec, spec),
        )  # fmt: skip

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager", dynamic=True)
    y = compiled(case.x, case.scale, *case.weights, case.token_of_row, case.row_of_pair)
    assert_same(case.gradients(y), want)


def test_maps_that_do_not_fit(device):
    case = Case(device)
    offsets, _ = case.groups(True, case.token_of_row.unsqueeze(1))

    def call(*row_map):
        return grouped_mlp(case.x, offsets, *case.weights, case.scale, row_map=row_map)

    with refused(ValueError, "grouped_mlp", "'row_of_pair'", "[36, 3]", "[37, k]"):
        call(case.token_of_row, case.row_of_pair[:36])
    with refused(ValueError, "grouped_mlp", "'token_of_row'", "Long"):
        call(case.token_of_row.long(), case.row_of_pair)
    with refused(ValueError, "grouped_mlp", "'sum_rows'", "without a map"):
        grouped_mlp(case.x, offsets, *case.weights, case.scale, sum_rows=True)
    with refused(ValueError, "grouped_mlp", "'token_of_row'", "one is missing"):
        call(case.token_of_row, None)
    with refused(ValueError, "scaled_activation", "'scale'", f"[{case.rows}]"):
        call(case.token_of_row[:-1].contiguous(), case.row_of_pair)
