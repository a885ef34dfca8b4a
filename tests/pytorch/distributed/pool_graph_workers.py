# The worker functions of test_pool_graphs.py, in a process of its own with NCCL and one rank: its collectives are real
# ones, and layers with a TPComm of one rank run all of them, which modules of one rank skip. A worker returns what is
# wrong, as words.
import copy
import itertools

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C
from transformer_engine.pytorch.functional import linear

from .captured_step import captured_step

TOKENS, HIDDEN, WIDE, STEPS = 512, 256, 512, 3


class Pairs(torch.nn.Module):
    """Pairs of a column and a row layer; with `group` None the same GEMMs, without communication."""

    def __init__(self, pairs, group, recompute=True):
        super().__init__()
        torch.manual_seed(3)
        shapes = [(WIDE, HIDDEN), (HIDDEN, WIDE)] * pairs
        on = {"device": here(), "dtype": torch.bfloat16}
        self.weights = torch.nn.ParameterList(torch.randn(n, k, **on) / k**0.5 for n, k in shapes)
        self.group, self.recompute = group, recompute

    def forward(self, x):
        for number, weight in enumerate(self.weights):
            column = number % 2 == 0
            how = (1 if column else 2, True, self.recompute or not column, 1, self.group)
            x = linear(x, weight, tp_comm=None if self.group is None else _C.GroupTPComm(*how))
        return x


def name():
    return dist.group.WORLD.group_name


def drawn():
    return torch.randn(TOKENS, HIDDEN, device=here(), dtype=torch.bfloat16)


def step(module, x, dy):
    module.zero_grad(set_to_none=True)
    leaf = x.detach().clone().requires_grad_()
    y = module(leaf)
    y.backward(dy)
    return [t.detach().clone() for t in (y, leaf.grad, *(p.grad for p in module.parameters()))]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))


def whole_steps(rank):
    """A step in one graph: the capture takes its buffers outside of the pool, and eager calls between the replays,
    whose released buffers are filled with NaN, do not touch the memory of the graph."""
    wrong, before = [], _C.poison_comm_buffers(True)
    for recompute, emptied in itertools.product((True, False), (True, False)):
        module, plain = Pairs(3, name(), recompute), Pairs(3, None)
        eager, x, dy = copy.deepcopy(module), drawn().requires_grad_(), drawn()
        if not emptied:
            step(eager, drawn(), drawn())
        else:
            _C.release_comm_buffers()
        graph, found = captured_step(module, x, dy, STEPS)
        results = list(found.values())
        there = _C.comm_buffer_usage(name())
        _C.release_comm_buffers()
        for number in range(STEPS):
            with torch.no_grad():
                x.copy_(drawn())
                dy.copy_(drawn())
            others = drawn(), drawn()
            graph.replay()
            found_eager = step(eager, *others)
            graph.replay()
            what = f"recompute {recompute}, emptied {emptied}, step {number}"
            wrong += [] if same(results, step(plain, x, dy)) else [f"{what}: the graph"]
            wrong += [] if same(found_eager, step(plain, *others)) else [f"{what}: eager between replays"]
        used = _C.comm_buffer_usage(name())
        wrong += [f"{there}, {used}: still in use"] if there[2] or used[2] else []
        wrong += [] if used[1] else ["eager calls used no buffer of the pool"]
        del graph, results, found
    _C.poison_comm_buffers(before)
    return wrong


def captures_take_no_slot(rank):
    """The pool is unchanged after a capture, whether it had buffers before or none."""
    wrong, module = [], Pairs(2, name())
    x, dy = drawn().requires_grad_(), drawn()
    for emptied in (False, True):
        graph, _ = captured_step(module, x, dy, STEPS)
        del graph
        if emptied:
            _C.release_comm_buffers()
        before = _C.comm_buffer_usage(name())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            module(x).backward(dy)
        if _C.comm_buffer_usage(name()) != before:
            wrong.append(f"emptied {emptied}: {before} before the capture, {_C.comm_buffer_usage(name())} after")
        graph.replay()
        torch.cuda.synchronize()
        del graph
    return wrong


def callables(rank):
    """te.make_graphed_callables, its replays beside eager calls."""
    wrong, before = [], _C.poison_comm_buffers(True)
    for recompute in (True, False):
        module, plain = Pairs(2, name(), recompute), Pairs(2, None)
        eager = copy.deepcopy(module)
        te.make_graphed_callables(module, (drawn().requires_grad_(),))
        for number in range(STEPS):
            (x, dy), others = (drawn(), drawn()), (drawn(), drawn())
            replayed, between = step(module, x, dy), step(eager, *others)
            wrong += [] if same(replayed, step(plain, x, dy)) else [f"recompute {recompute}, step {number}: replay"]
            wrong += [] if same(between, step(plain, *others)) else [f"recompute {recompute}, step {number}: eager"]
    _C.poison_comm_buffers(before)
    return wrong


def two_streams(rank):
    """Each stream has buffers of its own: concurrent steps on several streams have the bits of sequential steps."""
    wrong, before = [], _C.poison_comm_buffers(True)
    modules = [Pairs(3, name(), recompute) for recompute in (True, True, False)]
    given = [[(drawn(), drawn()) for _ in range(STEPS)] for _ in modules]
    wanted = [[step(Pairs(3, None), *pair) for pair in pairs] for pairs in given]
    _C.release_comm_buffers()
    step(modules[0], *given[0][0])
    alone = _C.comm_buffer_usage(name())
    streams = [torch.cuda.Stream() for _ in modules]
    torch.cuda.synchronize()
    found = [[] for _ in modules]
    for number in range(STEPS):
        for stream, module, pairs, results in zip(streams, modules, given, found):
            with torch.cuda.stream(stream):
                results.append(step(module, *pairs[number]))
    torch.cuda.synchronize()
    for i, (results, right) in enumerate(zip(found, wanted)):
        wrong += [f"stream {i}, step {n}" for n, (one, other) in enumerate(zip(results, right)) if not same(one, other)]
    used = _C.comm_buffer_usage(name())
    if used[2] or used[1] < len(streams) * alone[1]:
        wrong.append(f"{alone} of one stream, {used} of {len(streams)} more")
    _C.release_comm_buffers()
    _C.poison_comm_buffers(before)
    return wrong


def released_is_nan(rank):
    """Two microbatches in flight together; buffers that a call has returned to the pool are filled with NaN."""
    wrong, module, plain = [], Pairs(3, name()), Pairs(3, None)
    xs, dys = [drawn(), drawn()], [drawn(), drawn()]
    for poison in (True, False):
        before, results = _C.poison_comm_buffers(poison), []
        for each in (module, plain):
            each.zero_grad(set_to_none=True)
            leaves = [x.clone().requires_grad_() for x in xs]
            ys = [each(leaf) for leaf in leaves]
            for y, dy in reversed(list(zip(ys, dys))):
                y.backward(dy)
            results.append([*(y.detach() for y in ys), *(x.grad for x in leaves), *(p.grad for p in each.parameters())])
        wrong += [] if same(*results) else [f"poison {poison}"]
        _C.poison_comm_buffers(before)
    return wrong


def gloo_is_not_captured(rank):
    """The error names the op, the group and gloo, and an eager call after it works."""
    group = dist.new_group([0], backend="gloo").group_name
    x, wrong = drawn(), []
    calls = {
        "group_gather": lambda: torch.ops.te.group_gather(x, group, 1),
        "group_exchange": lambda: torch.ops.te.group_exchange(x, group, 1),
        "group_sum": lambda: torch.ops.te.group_sum(x, group, 1),
    }
    for op, call in calls.items():
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                call()
            wrong.append(f"{op}: captured")
        except RuntimeError as error:
            words = op, group, "gloo", "captured", "nccl"
            wrong += [] if all(word in str(error) for word in words) else [f"{op}: {error}"]
        wrong += [] if torch.equal(call().view(x.shape), x) else [f"{op}: other bits"]
    return wrong


WORKERS = (
    captures_take_no_slot, whole_steps, callables, two_streams, released_is_nan, gloo_is_not_captured,
)  # fmt: skip


def everything(rank):
    """Runs all workers in one process; the error of a worker counts as its result."""
    found = {}
    for worker in WORKERS:
        try:
            found[worker.__name__] = worker(rank)
        except Exception as error:
            found[worker.__name__] = [f"{type(error).__name__}: {error}"]
    return found
