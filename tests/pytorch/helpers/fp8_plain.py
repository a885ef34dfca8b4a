# FP8 in plain PyTorch, for the module tests: fake-quantized products, and delayed scaling's state kept in Python. No
# extension function is called here.
import torch

from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

RECIPES = {
    "delayed": lambda **options: DelayedScaling(**{"amax_history_len": 4, **options}),
    "current": Float8CurrentScaling,
    "block": Float8BlockScaling,
}
DTYPES = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}


def fp8_max(e5m2):
    return torch.finfo(DTYPES[e5m2]).max


def scale_of(amax, e5m2, pow_2=False):
    """float32 throughout; 1 where there is nothing to scale."""
    scale = torch.full_like(amax, fp8_max(e5m2)) / amax
    scale = torch.where((amax > 0) & amax.isfinite(), scale, 1.0).clamp(max=torch.finfo(torch.float32).max)
    return torch.exp2(torch.log2(scale.double()).floor()).float() if pow_2 else scale


def fake(t, scale, e5m2):
    """t's values after a trip through FP8, as float64; scale broadcasts."""
    largest = fp8_max(e5m2)
    data = (t.float() * scale).clamp(-largest, largest).to(DTYPES[e5m2])
    return data.double() * (1 / scale).double()


def blocks(t, rows, cols):
    """The amax of each block of rows x cols, repeated over it."""
    m, n = t.shape
    padded = torch.nn.functional.pad(t.float().abs(), (0, -n % cols, 0, -m % rows))
    tiles = padded.unflatten(1, (-1, cols)).unflatten(0, (-1, rows)).amax((1, 3))
    return tiles.repeat_interleave(rows, 0).repeat_interleave(cols, 1)[:m, :n]


class PlainScales:
    """Of one tensor under delayed scaling."""

    def __init__(self, length, e5m2=False):
        self.scale, self.history, self.e5m2 = torch.tensor(1.0), [0.0] * length, e5m2

    def see(self, t):
        self.history[0] = max(self.history[0], t.detach().float().abs().max().item())

    def update(self):
        amax = max(self.history)
        if amax > 0:
            self.scale = scale_of(torch.tensor(amax), self.e5m2)
        if self.history[0]:
            self.history = [0.0, *self.history[2:], self.history[0]][: len(self.history)]


class Operand:
    """A tensor as each product reads it: along its rows (reduced over columns) and along its columns."""

    def __init__(self, recipe, t, role, scales=None):
        e5m2 = role == "dy" and recipe != "block"
        if recipe == "block":
            two = role == "weight"
            self.rows = fake(t, scale_of(blocks(t, 128 if two else 1, 128), False, True), False)
            self.columns = fake(t, scale_of(blocks(t, 128, 128 if two else 1), False, True), False)
        else:
            scale = scales.scale if recipe == "delayed" else scale_of(t.float().abs().max(), e5m2)
            self.rows = self.columns = fake(t, scale, e5m2)


def linear(recipe, x, weight, bias, dy, scales=None):
    """{name: (value, sum of magnitudes)} of y, dx, dweight, dbias in float64, of 2-D x and dy."""
    scales = scales or dict.fromkeys(("x", "weight", "dy"))
    x_q, w_q = (Operand(recipe, t, role, scales[role]) for t, role in ((x, "x"), (weight, "weight")))
    dy_q = Operand(recipe, dy, "dy", scales["dy"])
    added = 0.0 if bias is None else bias.double()
    results = {
        "y": (x_q.rows @ w_q.rows.T + added, x_q.rows.abs() @ w_q.rows.abs().T + (added * 0 + abs(added))),
        "dx": (dy_q.rows @ w_q.columns, dy_q.rows.abs() @ w_q.columns.abs()),
        "dweight": (dy_q.columns.T @ x_q.columns, dy_q.columns.abs().T @ x_q.columns.abs()),
    }
    if bias is not None:
        results["dbias"] = dy.double().sum(0), dy.double().abs().sum(0)
    return results
