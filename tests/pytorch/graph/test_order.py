# Pipeline schedules of make_graphed_callables: what _order means, and that 1F1B, interleaved and delayed-gradient
# orders give the bits of eager, with and without shared buffers.
import copy
import gc

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.graph.capture import order
from transformer_engine.pytorch.graph.capture.order import Step, pipeline_schedule

from .cases import DELAYING, HIDDEN, TOKENS, assert_same_step, build, left_by, linear, mlp, norm_linear
from .orders import DELAYED, FOUR_STAGES, INTERLEAVED, ORDERS, check, chunks_of, every_order, pipelines


@every_order
@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_orders_equal_eager(device, name, layers, reuse):
    order_ = ORDERS[name]
    waits = [any(entry == -chunk - 1.5 for entry in order_) for chunk in range(chunks_of(order_))]
    modules = [build(linear, device, delay_wgrad_compute=wait) for wait in waits for _ in range(layers)]
    _, captured, eager = pipelines(modules, order_, layers, device, _reuse_graph_input_output_buffers=reuse)
    check(captured, eager, device)


@pytest.mark.parametrize("family", DELAYING, ids=lambda f: f.__name__)
@pytest.mark.parametrize("fuse", [False, True], ids=["grad", "main_grad"])
@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
def test_delayed_weight_gradients(device, family, fuse, reuse):
    modules = [build(family, device, delay_wgrad_compute=True, fuse_wgrad_accumulation=fuse) for _ in range(2)]
    for module in modules if fuse else []:
        for p in module.parameters():
            p.main_grad = torch.randn_like(p)
    _, captured, eager = pipelines(modules, DELAYED, 2, device, _reuse_graph_input_output_buffers=reuse)
    for twin, module in zip(eager.modules, modules):
        for p, q in zip(module.parameters(), twin.parameters()):
            if fuse:
                q.main_grad = p.main_grad.clone()
    check(captured, eager, device)


@pytest.mark.parametrize("reuse", [False, True], ids=["own", "reuse"])
@pytest.mark.parametrize("late", ["after each backward", "at the end", "at the end, in reverse"])
def test_delayed_gradients_without_entries_may_come_at_any_time(device, late, reuse):
    module = build(mlp, device, delay_wgrad_compute=True)
    graphed, captured, eager = pipelines([module], [1, 1, -1, -1], 1, device, _reuse_graph_input_output_buffers=reuse)
    if late == "after each backward":
        captured.order = eager.order = [1, 1, -1, -1.5, -1, -1.5]
        check(captured, eager, device)
        return
    for seed in range(2):
        got, want = captured.run(seed, device), eager.run(seed, device)
        for i in reversed(range(2)) if late.endswith("reverse") else range(2):
            graphed[i].backward_dw()
        for _ in range(2):
            eager.modules[0].backward_dw()
        for key in want:
            assert_same_bits(got[key], want[key])
        for p, q in zip(module.parameters(), eager.modules[0].parameters()):  # two addends, in either order
            assert_same_bits(p.grad, q.grad)
            p.grad = q.grad = None


def test_dropout_in_an_order(device):
    class Dropping(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = build(norm_linear, device)

        def forward(self, x):
            return torch.nn.functional.dropout(self.inner(x), 0.3)

    _, captured, eager = pipelines([Dropping() for _ in range(4)], INTERLEAVED, 2, device)
    check(captured, eager, device)


def storages(graphed):
    """Bytes of the distinct static tensors of all microbatches."""
    seen = {}
    for g in graphed:
        forth, back = g.record.forward_graph, g.record.backward_graph
        for t in (*forth.inputs, *forth.outputs, *back.grad_outputs, *back.grad_inputs):
            if t is not None:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
    return sum(seen.values())


def test_shared_buffers_take_less(device):
    sizes = []
    for reuse in (False, True):
        modules = [build(linear, device) for _ in range(4)]
        if device == "cuda":
            gc.collect()  # as in a capture: garbage of an earlier test would be counted as released
            torch.cuda.synchronize()
            before = torch.cuda.memory_allocated()
        graphed = pipelines(modules, FOUR_STAGES, 1, device, _reuse_graph_input_output_buffers=reuse)[0]
        if device == "cuda":
            torch.cuda.synchronize()
            sizes.append(torch.cuda.memory_allocated() - before)
        else:
            sizes.append(storages(graphed))
        for g in graphed:
            g.reset()
        del graphed, modules
    assert sizes[1] < 0.75 * sizes[0]


def test_outputs_live_until_their_backward(device):
    """With shared buffers, two microbatches in flight have separate outputs."""
    modules = [build(linear, device)]
    graphed, *_ = pipelines(modules, [1, 1, -1, -1], 1, device, _reuse_graph_input_output_buffers=True)
    assert len({g.record.forward_graph.outputs[0].data_ptr() for g in graphed}) == 2
    assert len({g.record.forward_graph.inputs[0].data_ptr() for g in graphed}) == 2
    graphed, *_ = pipelines(modules, [1, -1, 1, -1], 1, device, _reuse_graph_input_output_buffers=True)
    assert len({g.record.forward_graph.inputs[0].data_ptr() for g in graphed}) == 1
    assert len({g.record.backward_graph.grad_outputs[0].data_ptr() for g in graphed}) == 1
    if device == "cpu":
        assert len({g.record.forward_graph.outputs[0].data_ptr() for g in graphed}) == 1


# ---- the meaning of an order ----


def kinds(schedule):
    return [(step.kind[0], step.module, step.sample) for step in schedule.steps]


def test_the_index_of_samples():
    schedule = pipeline_schedule([1, 2, 1, 2, -2, -1, -2, -1], [1, 2], 3, [False] * 3)
    assert schedule.samples == 6
    assert kinds(schedule)[:6] == [("f", 0, 0), ("f", 1, 2), ("f", 2, 3), ("f", 0, 1), ("f", 1, 4), ("f", 2, 5)]
    backward = [step for step in kinds(schedule) if step[0] == "b"]
    assert backward == [("b", 2, 3), ("b", 1, 2), ("b", 0, 0), ("b", 2, 5), ("b", 1, 4), ("b", 0, 1)]
    assert schedule.steps[0] == Step(order.FORWARD, 0, 0)


def test_entries_for_weight_gradients():
    schedule = pipeline_schedule([1, 1, -1, -1.5, -1, -1.5], None, 2, [True] * 2)
    assert [step[0] for step in kinds(schedule)] == list("ffffbbwwbbww")
    assert schedule.scheduled_wgrad == {0, 1}
    assert pipeline_schedule([1, -1], None, 2, [True] * 2).scheduled_wgrad == frozenset()


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        ([], ["_order", "[]"]),
        ("11", ["_order"]),
        (3, ["_order"]),
        ([1, 0, -1], ["position 1", "from 1"]),
        ([1, True, -1], ["position 1"]),
        ([1, "x"], ["position 1"]),
        ([1, float("nan"), -1], ["position 1"]),
        ([1, float("inf"), -1], ["position 1"]),
        ([1, -1, -1.25], ["-1.25", "-c - 0.5"]),
        ([1, -1, -0.5], ["-0.5"]),
        ([1, 1.5, -1], ["1.5"]),
        ([1, -1, -1.5], ["-1.5", "delay_wgrad_compute"]),
        ([1, 1, -1], ["forward", "backward"]),
        ([1, 2, -2, -1, 1, -1], ["the same number"]),
        ([2, -2], ["none of chunk 1"]),
        ([-1, 1], ["position 0", "before"]),
        ([1, -1, -1, 1], ["position 2", "before"]),
    ],
)
def test_orders_that_mean_nothing(entries, words):
    with refused(ValueError, "make_graphed_callables", "'_order'", *words):
        pipeline_schedule(entries, None, 2, [False, False])


@pytest.mark.parametrize(
    "entries", [[1, -1.5, -1], [1, 1, -1, -1, -1.5, -1.5], [1, 1, -1, -1.5, -1], [1, -1, -1.5, -1.5]]
)
def test_weight_gradients_out_of_turn(entries):
    with refused(ValueError, "make_graphed_callables", "'_order'", "wanted one -1.5"):
        pipeline_schedule(entries, None, 1, [True])


@pytest.mark.parametrize("layers", [0, -1, 3, [1], [1, 2], [1, 0], [3, -1], [1, 1, 0], "2", True])
def test_layers_that_do_not_add_up(layers):
    with refused(ValueError, "'_num_layers_per_chunk'", repr(layers)):
        pipeline_schedule([1, 2, -2, -1], layers, 2, [False] * 2)


@pytest.mark.parametrize("layers", [[0, 2], [2, 0], [0, 1, 1], [1, 0, 1], [0, 2, 0]], ids=str)
@pytest.mark.parametrize("delayed", [False, True], ids=["now", "later"])
def test_chunks_without_layers(device, layers, delayed):
    """They have entries in the order, also for weight gradients, but neither samples nor callables."""
    chunks = range(1, len(layers) + 1)
    backward = [-c for c in reversed(chunks)] + [-c - 0.5 for c in reversed(chunks) if delayed]
    order_ = [*chunks, *chunks, *backward, *backward]
    modules = [build(linear, device, delay_wgrad_compute=delayed) for _ in range(2)]
    twins = copy.deepcopy(modules)
    graphed = te.make_graphed_callables(
        tuple(modules),
        tuple((torch.randn(*TOKENS, HIDDEN, device=device).requires_grad_(),) for _ in range(4)),
        _order=order_,
        _num_layers_per_chunk=layers,
        _reuse_graph_input_output_buffers=True,
    )
    # Samples are numbered by chunk, microbatch and layer, in this order of nesting.
    passes = [graphed[0::2], graphed[1::2]] if 2 in layers else [graphed[:2], graphed[2:]]
    x = [torch.randn(*TOKENS, HIDDEN, device=device) for _ in range(2)]
    results = [passes[1][m](passes[0][m](x[m].clone().requires_grad_())) for m in range(2)]
    wanted = [twins[1](twins[0](x[m].clone().requires_grad_())) for m in range(2)]
    for m in range(2):
        for y in (results[m], wanted[m]):
            y.sum().backward()
        for i in (1, 0) if delayed else ():
            passes[i][m].backward_dw()
            twins[i].backward_dw()
    for module, twin in zip(modules, twins):
        assert_same_step(left_by(module), left_by(twin))


def test_chunks_that_do_not_divide():
    with refused(ValueError, "'_order'", "3 modules", "'_num_layers_per_chunk'"):
        pipeline_schedule([1, 2, -2, -1], None, 3, [False] * 3)


@st.composite
def valid_orders(draw):
    """A random interleaving of forwards, backwards and perhaps weight gradients that keeps the order in each chunk."""
    chunks, microbatches = draw(st.integers(1, 3)), draw(st.integers(1, 4))
    delayed = [draw(st.booleans()) for _ in range(chunks)]
    counts = {(kind, c): 0 for kind in "fbw" for c in range(chunks)}
    entries = []
    while True:
        ready = []
        for c in range(chunks):
            f, b, w = (counts[kind, c] for kind in "fbw")
            ready += [("f", c)] if f < microbatches else []
            ready += [("b", c)] if b < f and (not delayed[c] or w == b) else []
            ready += [("w", c)] if delayed[c] and w < b else []
        if not ready:
            return entries, delayed
        kind, c = draw(st.sampled_from(ready))
        counts[kind, c] += 1
        entries.append({"f": c + 1, "b": -c - 1, "w": -c - 1.5}[kind])


@settings(derandomize=True, deadline=None, max_examples=25)
@given(valid_orders(), st.booleans())
def test_any_order_equals_eager(case, reuse):
    entries, delayed = case
    modules = [build(linear, "cpu", delay_wgrad_compute=wait) for wait in delayed]
    _, captured, eager = pipelines(modules, entries, 1, "cpu", _reuse_graph_input_output_buffers=reuse)
    check(captured, eager, "cpu", steps=1)
