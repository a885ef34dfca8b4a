# The replacement of a saved tensor: versions, storages that are resized, views of one storage, memory that was let go,
# quantized tensors part by part.
import pytest
import torch
from quantized_cases import FORMATS
from support import assert_same_bits, randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import saved as saved_hooks

from ..offload.cases import small  # noqa: F401
from .cases import Noted, Toy, same

pytestmark = pytest.mark.usefixtures("small")  # offload takes tensors of 64 elements and more


@pytest.mark.parametrize("how", ["kept", "taken", "gone"])
def test_versions(how, device):
    toy = Toy(1000 if how == "kept" else 0)
    x = randn(20, device=device, requires_grad=True)
    with saved_hooks.Hooks(toy):
        y = x.sin()
        z = y.exp()  # saves its result
    if how == "gone":
        toy.leave()
    expected = z.detach().clone()
    with torch.no_grad():
        z.mul_(2)
    if how == "gone":  # the copy is right
        assert_same_bits(torch.autograd.grad(z, y, torch.ones_like(z))[0], expected)
        return
    with refused(RuntimeError, "pop_tensor", "float32 [20]", "is at version 1, and was saved at version 0", "Clone"):
        torch.autograd.grad(z, y, torch.ones_like(z))


@pytest.mark.parametrize("taken", [False, True])
def test_a_resized_storage(taken, device):
    toy, x = Toy(0 if taken else 1000), randn(20, device=device, requires_grad=True)
    with saved_hooks.Hooks(toy):
        t = randn(20, device=device)
        y = x * t
    t.untyped_storage().resize_(0)
    with refused(RuntimeError, "pop_tensor", "had a storage of 80 bytes, which was resized"):
        y.sum().backward()


class Keeps(torch.autograd.Function):
    """Saves its arguments and returns the unpacked tensors."""

    @staticmethod
    def forward(ctx, back, x, *kept):
        ctx.back = back
        ctx.save_for_backward(*kept)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        ctx.back.append(ctx.saved_tensors)
        return None, gradient, *(None for _ in ctx.saved_tensors)


def there_and_back(client, *kept, leave=None, times=1):
    back, x = [], torch.ones(1, requires_grad=True)
    with saved_hooks.Hooks(client):
        y = Keeps.apply(back, x, *kept)
    (leave or client.leave)()
    for _ in range(times):
        y.backward(retain_graph=True)
    return back


@pytest.mark.parametrize("leaves", [True, False])
def test_views_of_one_storage_are_taken_once(leaves, device):
    base = randn(6, 8, device=device)
    z = torch.view_as_complex(base.view(24, 2))
    kept = [base, base.T, base[2:4, 1::2], base.view(torch.int32), base.detach(), z.conj(), torch._neg_view(base), z]
    toy = Toy()
    (back,) = there_and_back(toy, *kept, leave=None if leaves else list)
    assert toy.all == 1 and toy.offered == [(torch.float32, 48)]
    for t, b in zip(kept, back, strict=True):
        assert (b.shape, b.stride(), b.dtype, b.storage_offset()) == (t.shape, t.stride(), t.dtype, t.storage_offset())
        assert (b.is_conj(), b.is_neg()) == (t.is_conj(), t.is_neg())
        assert_same_bits(b.resolve_conj().resolve_neg(), t.resolve_conj().resolve_neg())
        assert (b.untyped_storage()._cdata == base.untyped_storage()._cdata) == (not leaves)
    assert len({b.untyped_storage()._cdata for b in back}) == 1


def test_memory_that_was_let_go_is_not_taken_for_a_later_one(device):
    toy, values, graphs = Toy(), [], []
    for i in range(4):  # an allocator reuses the address
        t = torch.full((1000,), float(i), device=device)
        back, x = [], torch.ones(1, requires_grad=True)
        with saved_hooks.Hooks(toy):
            graphs.append((back, Keeps.apply(back, x, t)))
        toy.leave()
        values.append(t.clone())
        del t
    for (back, y), value in zip(graphs, values, strict=True):
        y.backward()
        assert_same_bits(back[0][0], value)
    assert toy.all == 4


@pytest.mark.parametrize("first", ["lives", "ends"])
def test_a_storage_that_is_saved_again_is_taken_once_more(first, device):
    """By all that saves it after it was let go, or after its first graph has ended."""
    toy, t, x = Toy(), randn(20, device=device), torch.ones(1, requires_grad=True)
    with saved_hooks.Hooks(toy):
        y = Keeps.apply([], x, t)
    toy.leave()
    if first == "ends":
        del y
    with saved_hooks.Hooks(toy):
        z = Keeps.apply([], x, t, t[:5], t[5:])
    assert toy.all == 2
    del z


@pytest.mark.parametrize("marked", [False, True])
@pytest.mark.parametrize("kind", FORMATS)
def test_quantized_tensors_go_part_by_part(kind, marked, device):
    quantizer = FORMATS[kind](device=device)
    t = quantizer(randn(64, 128, device=device))
    wanted = [part.clone() for part in t.detach().prepare_for_saving()[0] if part is not None]
    if marked:
        te.mark_not_offload(t)
    toy, noted = Toy(), Noted()
    with noted.hooks():
        back, copy = there_and_back(toy, t, times=2)
    assert len(noted.packed) + len(toy.offered) >= len(wanted)
    assert bool(toy.offered) != marked
    assert type(back[0]) is type(t) and type(copy[0]) is type(t)
    for b in (back[0], copy[0]):
        parts = [part for part in b.detach().prepare_for_saving()[0] if part is not None]
        same(parts, wanted)
