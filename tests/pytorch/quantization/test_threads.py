# Settings belong to a thread, as with torch.autocast: a new thread starts with none, contexts of several are kept
# apart, and a backward has the settings of the thread that calls it, whichever thread runs it.
import threading
import types
import warnings

import pytest
import torch
from support import assert_same_bits, in_threads, randn

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling
from transformer_engine.pytorch.graph import is_graph_capturing, set_capture_end, set_capture_start
from transformer_engine.pytorch.quantization import FP8GlobalStateManager as Manager
from transformer_engine.pytorch.quantization.recipes import products
from transformer_engine.pytorch.quantization.state import autocast_state

pytestmark = pytest.mark.usefixtures("fp8_left_off")


def elsewhere(call):
    """The result of call() in a thread of its own."""
    found = []
    thread = threading.Thread(target=lambda: found.append(call()))
    thread.start()
    thread.join()
    return found[0]


def said():
    return (
        *Manager.get_fp8_autocast_state(),
        Manager.with_fp8_parameters(),
        Manager.with_high_precision_init_val(),
        Manager.get_skip_fp8_weight_update_tensor(),
        Manager.is_first_fp8_module(),
        is_graph_capturing(),
    )


NOTHING = (False, False, None, None, False, False, False, None, False, False)


def test_a_new_thread_starts_with_nothing():
    recipe = Float8CurrentScaling()
    set_capture_start()
    try:
        with te.autocast(recipe=recipe, _graph=True), te.quantized_model_init(preserve_high_precision_init_val=True):
            Manager.set_skip_fp8_weight_update_tensor(True)
            inside = said()
            assert inside[:3] == (True, False, recipe) and inside[4:7] == (True, True, True)
            assert inside[8:] == (True, True)
            assert elsewhere(said) == NOTHING
    finally:
        set_capture_end()
        Manager.set_skip_fp8_weight_update_tensor(None)
    assert said() == NOTHING


def test_what_one_thread_does_another_does_not_see():
    recipe = Float8BlockScaling()

    def other():
        with te.autocast(recipe=Float8CurrentScaling()), te.quantized_model_init():
            set_capture_start()
            Manager.reset()
            set_capture_end()
        return said()

    with te.autocast(recipe=recipe):
        set_capture_start()
        assert elsewhere(other) == NOTHING
        assert Manager.is_fp8_enabled() and Manager.get_fp8_recipe() is recipe and is_graph_capturing()
        set_capture_end()


def test_a_context_that_another_thread_leaves_is_its_own(device):
    """As a generator's that another thread closes."""
    context = te.autocast(recipe=Float8CurrentScaling())
    with te.autocast(recipe=Float8BlockScaling()):
        elsewhere(context.__enter__)
        context.__exit__(None, None, None)
        assert Manager.get_fp8_recipe().float8_block_scaling()
    context.__enter__()
    elsewhere(lambda: context.__exit__(None, None, None))
    assert said() == NOTHING


class _Deeper(torch.autograd.Function):
    """Its backward runs one inside of itself, `depth` deep: autograd hands those beyond some 60 to other threads."""

    @staticmethod
    def forward(ctx, x, depth, call):
        ctx.rest = depth, call
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        depth, call = ctx.rest
        if depth == 0:
            call()
        else:
            with torch.enable_grad():
                inner = _Deeper.apply(torch.ones(1, requires_grad=True), depth - 1, call)
            torch.autograd.backward(inner, gradient)
        return gradient, None, None


def on_autograds_thread(call):
    """call() in a backward that this thread calls and another one runs."""
    found = []

    def work():
        try:
            found.append((threading.get_ident(), call()))
        except BaseException as error:
            found.append((threading.get_ident(), error))

    _Deeper.apply(torch.ones(1, requires_grad=True), 61, work).backward()
    (thread, result), own_thread = found[0], threading.get_ident()
    assert thread != own_thread
    if isinstance(result, BaseException):
        raise result
    return result


def test_a_backward_has_what_is_on_where_it_is_called():
    recipe = Float8BlockScaling()

    def nested():
        before = said()
        with te.autocast(recipe=Float8CurrentScaling()), te.quantized_model_init():
            inside = Manager.get_fp8_recipe().float8_current_scaling() and Manager.with_fp8_parameters()
        return before, inside, said()

    for _ in range(2):
        assert on_autograds_thread(said) == NOTHING
        with te.autocast(recipe=recipe):
            assert on_autograds_thread(said)[:3] == (True, False, recipe)
            before, inside, after = on_autograds_thread(nested)
            assert before[:3] == after[:3] == (True, False, recipe) and inside
            assert Manager.get_fp8_recipe() is recipe and not Manager.with_fp8_parameters()
            with te.autocast(enabled=False):
                assert on_autograds_thread(said)[0] is False
        set_capture_start()
        assert on_autograds_thread(said)[-1] is True and elsewhere(lambda: on_autograds_thread(said)) == NOTHING
        set_capture_end()
    assert on_autograds_thread(said) == NOTHING == said()


def test_a_copy_is_of_one_backward(monkeypatch):
    """As a device's thread of autograd has it, which keeps what is its own from backward to backward; the threads above
    do not."""
    theirs, backward = autocast_state.current_state(), [1]
    names = types.SimpleNamespace(calling_thread=lambda: theirs.thread)
    monkeypatch.setattr(autocast_state, "_C", names)
    monkeypatch.setattr(autocast_state, "current_graph_task_id", lambda: backward[0])

    def runs():
        found = [Manager.is_fp8_enabled()]
        theirs.set(True, False, Float8CurrentScaling(), None)
        found.append(Manager.is_fp8_enabled())
        backward[0] = 2
        found.append(Manager.is_fp8_enabled())
        with te.autocast(enabled=False):
            backward[0] = 3  # one inside of the other
            found.append(Manager.is_fp8_enabled())
        found.append(Manager.is_fp8_enabled())
        return found

    try:
        assert elsewhere(runs) == [False, False, True, False, True]
    finally:
        theirs.set(False, False, None, None)


def test_backwards_of_two_threads_are_kept_apart():
    recipes = [Float8BlockScaling(), Float8CurrentScaling()]

    def work(i):
        for _ in range(20):
            with te.autocast(recipe=recipes[i]):
                if on_autograds_thread(said)[:3] != (True, False, recipes[i]):
                    return False
            if on_autograds_thread(said) != NOTHING:
                return False
        return True

    assert in_threads(2, work) == [True, True]


def test_regions_that_wait_are_updated_by_a_backward(device):
    """A graph's owner has the backward's scales made, where its backward runs."""
    module, recipe = te.Linear(16, 16, device=device), DelayedScaling(amax_history_len=1)
    x = randn(8, 16, device=device)
    with te.autocast(recipe=recipe):
        module(x).sum().backward()
    state = module.fp8_meta["scaling_bwd"]
    with te.autocast(recipe=recipe, _graph=True):
        Manager.is_first_fp8_module()
        Manager.add_fp8_tensors_to_global_buffer(module.fp8_meta)
    state.amax_history[0].fill_(7.0)
    elsewhere(lambda: Manager.reduce_and_update_fp8_tensors(forward=False))  # which has none
    assert state.amax_history[0].eq(7.0).all()
    on_autograds_thread(lambda: Manager.reduce_and_update_fp8_tensors(forward=False))
    assert state.scale[0].item() == 57344 / 7


@pytest.mark.parametrize("kind", [Float8CurrentScaling, Float8BlockScaling, DelayedScaling])
def test_recomputation_on_another_thread(device, kind):
    """By te.checkpoint wherever the backward is called, by torch's own inside of te.autocast."""
    module, x = te.LayerNormMLP(32, 32, device=device), randn(16, 32, device=device)

    def grads(run, inside):
        module.zero_grad()
        with te.autocast(recipe=kind()):
            y = run(module, x.clone().requires_grad_()).sum()
            if inside:
                on_autograds_thread(y.backward)
        if not inside:
            on_autograds_thread(y.backward)
        return [p.grad for p in module.parameters()]

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        grads(lambda m, t: m(t), True)  # delayed scaling's first scales
        if kind is DelayedScaling:
            module.eval()  # scales stay
        wanted = grads(lambda m, t: m(t), True)
        cases = [(te.checkpoint, True), (te.checkpoint, False)] if kind is not DelayedScaling else []
        cases += [(lambda m, t: torch.utils.checkpoint.checkpoint(m, t, use_reentrant=False), True)]
        for run, inside in cases:
            for got, want in zip(grads(run, inside), wanted, strict=True):
                assert_same_bits(got, want)


def test_a_compiled_function_in_two_threads(device):
    """Guards see another recipe, and another thread's. In turns: Dynamo's cache is not for two threads at a time."""
    module, x = te.Linear(32, 32, device=device), randn(16, 32, device=device)
    kinds = [Float8CurrentScaling, Float8BlockScaling, None]
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    run = torch.compile(lambda t: module(t), backend=backend, fullgraph=True)

    def both(kind):
        with torch.no_grad():
            if kind is None:
                return run(x), module(x)
            with te.autocast(recipe=kind()):
                return run(x), module(x)

    def check(order):
        for kind in order:
            assert_same_bits(*both(kind))
        return True

    assert check(kinds * 2) and len(graphs) == 3
    wanted = [both(kind)[0] for kind in kinds]
    assert not torch.equal(wanted[0], wanted[1]) and not torch.equal(wanted[0], wanted[2])
    with te.autocast(recipe=Float8BlockScaling()), torch.no_grad():
        assert elsewhere(lambda: check(kinds[::-1] * 2)) and len(graphs) == 3
        assert_same_bits(run(x), wanted[1])
    assert len(graphs) == 3


def test_recipes_of_equal_values_have_one_plan(monkeypatch):
    """Plans are compared by identity, whichever of two threads that make one at a time is first."""
    made, new_plan = threading.Barrier(2), products._new_plan

    def both_make(recipe):
        plan = new_plan(recipe)
        made.wait(60)
        return plan

    monkeypatch.setattr(products, "_new_plan", both_make)
    one, other = in_threads(2, lambda _: products.plan_of(DelayedScaling(margin=5, amax_history_len=77)))
    assert one is other
