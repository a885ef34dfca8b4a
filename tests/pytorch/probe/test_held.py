# te.memory_plan of a graph that holds more than saved tensors: tensors that hooks inside of the module have packed,
# that checkpoints' functions hold, that are kept on ctx; compared with the allocator's statistics where it has them.
import functools
import gc
import threading
import weakref

import pytest
import torch
from support import assert_same_bits, randn
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import create_selective_checkpoint_contexts

import transformer_engine.pytorch as te

HIDDEN, FFN, TOKENS = 32, 56, (6, 2)


class Hooked(torch.nn.Module):
    """A layer with saved-tensor hooks around it."""

    def __init__(self, hooks, inner=None):
        super().__init__()
        self.hooks, self.inner = hooks, inner or te.LayerNormMLP(HIDDEN, FFN, device="cpu")

    def forward(self, x):
        with self.hooks():
            return self.inner(x)


class Box:
    """The result of a hook, which holds a tensor in an attribute."""

    def __init__(self, t):
        self.held = [t]


def by_table():
    """Hooks that keep tensors in their own table, and return numbers to the graph."""
    table = []

    def pack(t):
        table.append(t.clone())
        return len(table) - 1

    return saved_tensors_hooks(pack, lambda i: table[i])


def bound():
    class Codec:
        def pack(self, t):
            return t

        def unpack(self, t):
            return t

    codec = Codec()
    return saved_tensors_hooks(codec.pack, codec.unpack)


SAME = {
    "identity": lambda: saved_tensors_hooks(lambda t: t, lambda t: t),
    "boxed": lambda: saved_tensors_hooks(Box, lambda box: box.held[0]),
    "bound": bound,
    "save_on_cpu": save_on_cpu,
}


def sample():
    return randn(*TOKENS, HIDDEN, requires_grad=True)


def plan_of(hooks, x):
    torch.manual_seed(0)
    return te.memory_plan(Hooked(hooks), x)


@pytest.mark.parametrize("name", SAME)
def test_hooks_that_keep_what_they_are_given(name):
    """The rows of a plan without hooks; on the CPU save_on_cpu moves nothing."""
    x = sample()
    want, got = plan_of(torch.enable_grad, x), plan_of(SAME[name], x)
    said = [[(row.op, row.name, row.shape, row.bytes, row.status) for row in plan.rows] for plan in (got, want)]
    assert got.kept_bytes == want.kept_bytes > 0 and said[0] == said[1]
    assert {row.module for row in got.rows} == {"inner"}


def test_hooks_that_make_something_else():
    """Half of the bytes, or copies in the table of the hooks."""
    x = sample()
    kept = plan_of(torch.enable_grad, x).rows
    halved = plan_of(lambda: saved_tensors_hooks(lambda t: (t.dtype, t.half()), lambda p: p[1].to(p[0])), x)
    # Every tensor is packed, also parameters and the input, and is a separate tensor then.
    assert halved.kept_bytes == sum(row.bytes for row in kept if row.status != "recomputed") // 2
    assert {row.op for row in halved.rows if row.status == "kept"} == {"saved-tensor hook"}
    assert all(row.why and row.recompute for row in halved.rows)
    assert plan_of(by_table, x).kept_bytes == 2 * halved.kept_bytes


@pytest.mark.gpu
def test_what_hooks_move_to_the_host():
    module, x = Hooked(save_on_cpu, te.LayerNormMLP(HIDDEN, FFN, device="cuda")), sample().cuda().requires_grad_()
    plan = te.memory_plan(module, x)
    assert plan.kept_bytes == 0 and plan.bytes_of("offloaded") > 0


def test_hooks_inside_of_hooks_and_of_the_caller():
    x, outer = sample(), []
    want = plan_of(torch.enable_grad, x).kept_bytes

    class Both(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = (Hooked(SAME["identity"]) for _ in "ab")

        def forward(self, x):
            with SAME["boxed"]():
                y = torch.nn.functional.silu(self.first(x))
                return self.second(y)

    with saved_tensors_hooks(lambda t: (outer.append(t), t)[1], lambda t: t):
        plan = te.memory_plan(Both(), x)
    assert plan.kept_bytes == 2 * want + 2 * x.nbytes  # the input of silu, and its result
    assert outer == []


def test_hooks_are_as_before():
    """Hooks are not watched afterwards, also after an error; hooks of another thread are not part of this plan."""
    enter = saved_tensors_hooks.__enter__

    class Fails(torch.nn.Module):
        def forward(self, x):
            raise KeyError("as it is")

    with pytest.raises(KeyError):
        te.memory_plan(Fails(), sample())
    assert saved_tensors_hooks.__enter__ is enter
    seen = []

    class Elsewhere(torch.nn.Module):
        def forward(self, x):
            def work():
                with saved_tensors_hooks(lambda t: (seen.append(t), t)[1], lambda t: t):
                    (torch.ones(4, requires_grad=True) * torch.ones(4)).sum()

            thread = threading.Thread(target=work)
            thread.start()
            thread.join()
            return x * 2

    assert te.memory_plan(Elsewhere(), sample()).kept_bytes == 0 and len(seen) == 1
    module, x = Hooked(SAME["boxed"]), sample()
    te.memory_plan(module, x)
    y, want = module(x), module.inner(x)
    assert_same_bits(y, want)
    (got,), (wanted,) = (torch.autograd.grad(t.sum(), x) for t in (y, want))
    assert_same_bits(got, wanted)


def test_nothing_lives_on():
    module, x = Hooked(SAME["boxed"]), sample()
    alive = weakref.ref(module), weakref.ref(x)
    te.memory_plan(module, x)
    del module, x
    gc.collect()
    assert [ref() for ref in alive] == [None] * 2


# ---- checkpoints, against the allocator ----


class Checkpointed(torch.nn.Module):
    def __init__(self, way):
        super().__init__()
        self.way, self.linear = way, te.Linear(HIDDEN, HIDDEN, device="cpu")

    def forward(self, x):
        factor, shift = torch.full((1000,), 2.0), torch.ones(500)

        def function(t, scale, *, by=None):
            return self.linear(t * scale[0]) + by[0]

        return self.way(functools.partial(function, by=shift), x, factor)


WAYS = {
    "te": te.checkpoint,
    "te, not reentrant": functools.partial(te.checkpoint, use_reentrant=False),
    "te, no states": functools.partial(te.checkpoint, preserve_rng_state=False),
    "torch": functools.partial(torch_checkpoint, use_reentrant=True),
    "torch, not reentrant": functools.partial(torch_checkpoint, use_reentrant=False),
    "torch, no states": functools.partial(torch_checkpoint, use_reentrant=False, preserve_rng_state=False),
}


def live_bytes(call):
    """The bytes allocated after it, without its result."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as measured:
        y = call()
    events = measured.profiler.kineto_results.events()
    return sum(e.nbytes() for e in events if e.name() == "[memory]") - y.untyped_storage().nbytes()


@pytest.mark.parametrize("name", WAYS)
def test_what_a_checkpoints_function_holds(name):
    """The tensor in its closure, its arguments, the random states: as many bytes as the allocator reports."""
    module, x = Checkpointed(WAYS[name]), sample()
    module(x)  # one-time allocations
    plan = te.memory_plan(module, x)
    states = 0 if "no states" in name else torch.get_rng_state().nbytes
    if states and name.startswith("te") and torch.cuda.is_available():
        states += torch.cuda.get_rng_state().nbytes
    assert plan.kept_bytes == 4000 + 2000 + states
    assert live_bytes(lambda: module(x)) == plan.kept_bytes
    rows = {row.name: row for row in plan.rows}
    assert rows["by"].bytes == 2000 and rows["by"].op == "checkpoint"


def test_attention_that_recomputes_itself():
    attention = te.DotProductAttention(2, 8, attn_mask_type="padding", qkv_format="bshd")
    q = randn(2, 100, 2, 8, requires_grad=True)
    options = {"attention_mask": torch.zeros(2, 1, 1, 100, dtype=torch.bool), "checkpoint_core_attention": True}
    plan = te.memory_plan(attention, q, q, q, **options)
    assert live_bytes(lambda: attention(q, q, q, **options)) == plan.kept_bytes
    assert {"unseen", "random state"} <= {row.name for row in plan.rows}


def test_selective_checkpoints():
    """They also keep the tensors that their policy selects."""
    keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.te.linear_fwd.default])
    bare = Checkpointed(functools.partial(te.checkpoint, use_reentrant=False))
    module, x = Checkpointed(functools.partial(te.checkpoint, use_reentrant=False, context_fn=keep)), sample()
    assert te.memory_plan(module, x).kept_bytes - te.memory_plan(bare, x).kept_bytes == x.nbytes


# ---- ctx ----


class OnCtx(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, sign):
        ctx.kept, ctx.nested, ctx.sign = x * 2, {"more": [torch.ones(10)]}, sign
        return x * sign

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.sign, None


def test_tensors_on_ctx():
    class Uses(torch.nn.Module):
        def forward(self, x):
            return OnCtx.apply(x, -1)

    x = sample()
    plan = te.memory_plan(Uses(), x)
    assert plan.kept_bytes == x.nbytes + 40
    assert {(row.op, row.name) for row in plan.rows} == {("OnCtx", "kept"), ("OnCtx", "nested")}
