# The contexts and results of programs over captured callables: recipes, streams, state, comparisons. No test is here.
import torch
from support import assert_same_bits

from transformer_engine.common import recipe
from transformer_engine.pytorch.graph.backend.cpu import RecordedGraph, RecordedStream

ROWS = 16
RECIPES = {
    "delayed": recipe.DelayedScaling(amax_history_len=3),
    "delayed, most recent": recipe.DelayedScaling(amax_history_len=2, amax_compute_algo="most_recent", margin=1),
    "current": recipe.Float8CurrentScaling(),
    "block": recipe.Float8BlockScaling(),
}


def stream_on(device):
    return torch.cuda.Stream() if device == "cuda" else RecordedStream("graph")


def _saved(pack):
    return torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t)


def unchecked(graphed, modules):
    """The CPU backend calls eager functions, whose autograd graph detects writes to saved tensors. A CUDA graph does
    not: from here on only the checks of captured callables detect them."""
    held, set_versions = tuple(modules.parameters()), torch._C._autograd._unsafe_set_version_counter

    def quiet(work):
        def run():
            versions = tuple(p._version for p in held)
            set_versions(held, (0,) * len(held))
            try:
                with _saved(torch.Tensor.detach):
                    return work()
            finally:
                set_versions(held, versions)

        return run

    for one in (getattr(one, "forward", one) for one in graphed):  # a module has it as its forward
        for own in (one.record.forward_graph, one.record.backward_graph, one.record.wgrad_graph):
            graph = getattr(own, "graph", None)
            if isinstance(graph, RecordedGraph):
                graph.func = quiet(graph.func)


def left_by(modules):
    """Gradients, main_grad and its marks, scales and histories after a step."""
    left = {}
    for name, p in modules.named_parameters():
        dummy = p.dim() == 2 and hasattr(p, "main_grad")  # has no values
        left[f"{name}.grad"] = (p.grad is not None) if dummy else None if p.grad is None else p.grad.clone()
        if hasattr(p, "main_grad"):
            left[f"{name}.main_grad"] = p.main_grad + 0.0  # -0.0 where eager overwrites, and a graph adds it to 0
            left[f"{name} is added"] = getattr(p, "grad_added_to_main_grad", None)
    for name, part in modules.named_modules():
        for key in ("scaling_fwd", "scaling_bwd"):
            state = getattr(part, "fp8_meta", {}).get(key)
            if state is not None:
                left[f"{name}.{key}.scale"] = state.scale.clone()
                left[f"{name}.{key}.history"] = state.amax_history.clone()
    return left


def assert_same(got, want, what):
    got, want = dict(got), dict(want)
    for name in [name for name in got if name not in want and ".scaling_" in name]:  # eager did not run it yet
        value = got.pop(name)
        assert torch.equal(value, torch.full_like(value, float(name.endswith("scale")))), f"{what} {name}: {value}"
    assert got.keys() == want.keys(), f"{what}: {got.keys() ^ want.keys()}"
    for name, value in want.items():
        if isinstance(value, torch.Tensor):
            assert isinstance(got[name], torch.Tensor), f"{what} {name}: {got[name]}, wanted a tensor"
            assert_same_bits(got[name], value, f"{what} {name}")
        else:
            assert got[name] is value, f"{what} {name}: {got[name]}, wanted {value}"
