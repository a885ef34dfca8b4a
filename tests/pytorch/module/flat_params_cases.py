# Helpers of the suites of row units: a model of such units, and checks of where they are in memory. No test is here.
import re
from pathlib import Path

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import transformer_engine.pytorch as te

EXAMPLE = re.search(
    r"^```python\n(.*?)^```", (Path(__file__).parents[3] / "docs/guide/parameters.md").read_text(), re.M | re.S
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


def units(module):
    return [unit for part in module.modules() if hasattr(part, "row_units") for unit in part.row_units()]


def joins_without_copy(module):
    with Ran() as ran:
        for unit in units(module):
            te.functional.noop_cat(unit.parameters)
    return "cat" not in ran.names and all(unit.in_order() for unit in units(module))


def in_one_buffer(parameters, align=64):
    """A data-parallel owner without support for units: parameters in the given order, padding between."""
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
