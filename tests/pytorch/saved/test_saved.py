# Saved-tensor hooks, with a StorageHandler of the test's own: it takes float32 tensors above a size, alone, inside of
# an offload context and around one, under hooks that are not ours, through checkpoints and graphs that are gone through
# twice; test_saved_storage.py tests storages and views. Gradients are always the bits of a run without.
import gc

import pytest
import torch
from quantized_cases import FORMATS
from support import randn, refused
from torch.autograd.graph import save_on_cpu

import transformer_engine.pytorch as te
from transformer_engine.pytorch import saved as saved_hooks

from ..offload.cases import small  # noqa: F401
from .cases import Copied, Noted, Toy, same

pytestmark = pytest.mark.usefixtures("small")  # offload takes tensors of 64 elements and more


class Mixed(torch.nn.Module):
    """Saves float32 and bfloat16 tensors of 96 elements, float32 ones of 8, and a parameter."""

    def __init__(self, device):
        super().__init__()
        torch.manual_seed(0)
        self.weight = torch.nn.Parameter(torch.randn(8, device=device))

    def forward(self, x):
        y = (x * self.weight).sin()
        z = y.bfloat16().cos()
        return z.float() * y + (y.sum(0).sin() * self.weight).exp()


def given(device):
    torch.manual_seed(1)
    return torch.randn(12, 8, device=device, requires_grad=True)


def gradients(module, x, y, **how):
    return torch.autograd.grad(y, [x, *module.parameters()], torch.ones_like(y), **how)


def plain(module, x):
    return gradients(module, x, module(x))


def top():
    return torch._C._autograd._top_saved_tensors_default_hooks(True)


@pytest.mark.parametrize("leaves", [True, False])
@pytest.mark.parametrize("n", [0, 50, 1000])
def test_a_handler_takes_its_tensors(n, leaves, device):
    module, x, toy = Mixed(device), given(device), Toy(n)
    expected = plain(module, x)
    with saved_hooks.Hooks(toy):
        y = module(x)
    assert top() is None
    sizes = {count for dtype, count in toy.offered if dtype is torch.float32}
    assert sizes == {96, 8} and (torch.bfloat16, 96) in toy.offered
    assert (toy.all == 0) == (n == 1000)
    if leaves:
        toy.leave()
        assert all(memory.tensor is None for memory in toy.taken)
    same(gradients(module, x, y), expected)
    assert (toy.restored > 0) == (leaves and n < 1000)


def test_parameters_and_what_is_marked_are_not_offered(device):
    toy, noted = Toy(), Noted()
    weight, marked = torch.nn.Parameter(randn(16, device=device)), randn(16, device=device)
    te.mark_not_offload(marked)
    x = randn(16, device=device, requires_grad=True)
    with noted.hooks(), saved_hooks.Hooks(toy):
        y = (x * weight).sum() + (x * weight.view(4, 4).view(-1)).sum() + (x * marked[:]).sum()
    y.backward()
    assert toy.offered == [(torch.float32, 16)]  # x, once
    assert len(noted.packed) == 3 and noted.unpacked == 3
    torch.testing.assert_close(x.grad, weight.detach() + weight.detach() + marked)


@pytest.mark.parametrize("order", ["inside", "around"])
def test_beside_offload(order, device):
    """Inside: the handler takes the large float32 tensors, offload the others. Around: offload takes all large ones."""
    module, x, toy = Mixed(device), given(device), Toy(50 if order == "inside" else 0)
    expected = plain(module, x)
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    first, second = (context, saved_hooks.Hooks(toy)) if order == "inside" else (saved_hooks.Hooks(toy), context)
    with first, second:
        y = module(x)
    y = sync(y)
    toy.leave()
    with context:
        tail = y * 1
    tail = sync(tail)
    offloaded = context.offload_synchronizer.get_offloaded_total_size_mb() * 2**20
    counts = {memory.bytes for memory in toy.taken}
    if order == "inside":
        assert offloaded == 2 * 96 and counts == {4 * 96}
    else:
        assert offloaded >= 2 * 96 + 4 * 96 and counts == {4 * 8}
    same(gradients(module, x, tail), expected)
    assert toy.restored > 0


def test_contexts_within_contexts(device):
    """The innermost context comes first, each outer one gets the rest, and foreign hooks come last."""
    module, x = Mixed(device), given(device)
    expected = plain(module, x)
    inner, middle, outer, noted = Toy(50), Toy(1000), Toy(0), Noted()
    with noted.hooks(), saved_hooks.Hooks(outer), saved_hooks.Hooks(middle), saved_hooks.Hooks(inner):
        y = module(x)
    assert inner.all > 0 and middle.all == 0 and outer.all > 0
    assert middle.offered == [entry for entry in inner.offered if entry != (torch.float32, 96)]
    assert {memory.bytes for memory in outer.taken} == {4 * 8}
    assert noted.packed and all(dtype is torch.bfloat16 or leaf for dtype, _, leaf in noted.packed)
    inner.leave(), outer.leave()
    same(gradients(module, x, y), expected)
    assert noted.unpacked == len(noted.packed)


def test_tensors_in_an_outer_context_are_fetched_before_any_is_read(device):
    """All parts of a quantized tensor come back at once, whichever context around took them."""
    steps = []

    class Away(Copied):
        def fetch(self):
            steps.append("fetch")

        def restore(self):
            steps.append("restore")
            return super().restore()

    class Everything(Toy):
        def take(self, tensor):
            memory = Away(tensor)
            memory.client = self
            return memory

    t, outer = FORMATS["block1d"](device=device)(randn(128, 128, device=device)), Everything()
    with saved_hooks.Hooks(outer), saved_hooks.Hooks(Toy(10**9)) as inner:
        saved = inner.pack(t)
    outer.leave()
    saved_hooks.unpack(saved)
    assert steps.count("fetch") == steps.count("restore") > 1
    assert steps == sorted(steps)


def test_hooks_that_are_popped_twice_leave_those_around(device):
    noted = Noted()
    with noted.hooks():
        around = top()
        with saved_hooks.Hooks(Toy()) as hooks:
            assert top() != around
        hooks.pop()
        assert top() == around
    assert top() is None


def test_hooks_in_between_are_the_last_that_are_asked(device):
    """As in torch: they hide all tensors from contexts around them."""
    module, x, toy, around, noted = Mixed(device), given(device), Toy(50), Toy(0), Noted()
    expected = plain(module, x)
    with saved_hooks.Hooks(around), noted.hooks(), saved_hooks.Hooks(toy):
        y = module(x)
    assert toy.all and noted.packed and not around.offered
    with saved_hooks.Hooks(toy), noted.hooks():
        offered = len(toy.offered)
        module(x)
        assert len(toy.offered) == offered
    same(gradients(module, x, y), expected)


@pytest.mark.parametrize("who", ["toy", "offload"])
def test_the_rest_goes_to_save_on_cpu(who, device):
    module, x, toy = Mixed(device), given(device), Toy(50)
    expected = plain(module, x)
    context, sync = te.get_cpu_offload_context(True, 1, 2)
    packs = []

    class Counted(save_on_cpu):
        def __init__(self):
            super().__init__()
            pack = self.pack_hook
            self.pack_hook = lambda t: (packs.append(t.numel()), pack(t))[1]

    with Counted(), context if who == "offload" else saved_hooks.Hooks(toy):
        y = module(x)
    y = sync(y) if who == "offload" else y
    assert 8 in packs and (who == "toy" or 96 not in packs)
    toy.leave()
    same(gradients(module, x, y), expected)


def test_what_a_take_raises_is_raised_by_the_operation(device):
    module, x, toy = Mixed(device), given(device), Toy()
    expected = plain(module, x)

    class Failing(Toy):
        def take(self, tensor):
            if tensor.dtype is torch.bfloat16:
                raise MemoryError("no page is left")
            return super().take(tensor)

    failing = Failing()
    with saved_hooks.Hooks(toy):
        with refused(MemoryError, "no page is left"), saved_hooks.Hooks(failing):
            module(x)
        gc.collect()  # freed with the traceback
        assert failing.all and not failing.taken  # the graph is freed
        y = module(x)
    assert top() is None
    toy.leave()
    same(gradients(module, x, y), expected)


def test_a_graph_that_is_gone_through_twice(device):
    module, x, toy = Mixed(device), given(device), Toy()
    expected = plain(module, x)
    with saved_hooks.Hooks(toy):
        y = module(x)
    same(gradients(module, x, y, retain_graph=True), expected)
    toy.leave()
    for _ in range(2):
        same(gradients(module, x, y, retain_graph=True), expected)
    assert toy.taken
    del y
    assert not toy.taken


def test_nothing_is_held_by_a_cycle(device):
    module, x, toy, noted = Mixed(device), given(device), Toy(50), Noted()
    gc.collect()
    gc.disable()
    try:
        with noted.hooks(), saved_hooks.Hooks(Toy(1000)), saved_hooks.Hooks(toy):
            y = module(x)
        del y
        assert not toy.taken
    finally:
        gc.enable()


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_checkpoint_inside(reentrant, device):
    """Its first run saves only its inputs; its second run, in the backward, is offered to no handler."""
    module, x, toy = Mixed(device), given(device), Toy()
    expected = plain(module, x)
    for run in (torch.utils.checkpoint.checkpoint, te.checkpoint):
        toy.offered.clear()
        start = x * 1
        with saved_hooks.Hooks(toy):
            y = run(module, start, use_reentrant=reentrant)
            after = y.sin()
        assert set(toy.offered) <= {(torch.float32, 96), (torch.float32, 0)}
        toy.leave()
        offered = len(toy.offered)
        x.grad = module.weight.grad = None
        after.backward(1 / y.detach().cos())
        assert len(toy.offered) == offered
        torch.testing.assert_close([x.grad, module.weight.grad], list(expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_context_inside_of_a_checkpoint_takes_nothing(reentrant, device):
    module, x, toy = Mixed(device), given(device), Toy()
    expected = plain(module, x)

    def run(x):
        with saved_hooks.Hooks(toy):
            return module(x)

    y = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=reentrant)
    y.backward(torch.ones_like(y))
    assert not toy.offered
    same([x.grad, module.weight.grad], expected)


def test_nothing_is_recorded(device):
    module, x, toy = Mixed(device), given(device), Toy()
    with torch.no_grad(), saved_hooks.Hooks(toy):
        assert top() is None
        with torch.enable_grad():
            module(x)
    assert not toy.offered and top() is None


def test_a_second_derivative_inside_of_a_context(device):
    x, toy = given(device), Toy()

    def second(y):
        (first,) = torch.autograd.grad(y, x, torch.ones_like(y), create_graph=True)
        return torch.autograd.grad(first.sin(), x, torch.ones_like(first))

    expected = second(x.sin())
    with saved_hooks.Hooks(toy):
        y = x.sin()
        toy.leave()
        found = second(y)
    same(found, expected)
    assert toy.restored


def test_the_memory_plan_lists_every_handler(device):
    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.toy = Mixed(device), Toy(50)

        def forward(self, x):
            with saved_hooks.Hooks(self.toy):
                y = self.inner(x)
            self.toy.leave()
            return y

    module = Both()
    with_toy, without = te.memory_plan(module, given(device)), te.memory_plan(module.inner, given(device))
    copied = [row for row in with_toy.rows if row.status == "copied"]
    assert copied and all(row.bytes == 4 * 96 and row.recompute == "nothing: it was copied" for row in copied)
    assert "copied 384 B" in str(with_toy) or f"copied {384 * len(copied):,} B" in str(with_toy)
    assert sum(row.bytes for row in with_toy.rows) == sum(row.bytes for row in without.rows)
