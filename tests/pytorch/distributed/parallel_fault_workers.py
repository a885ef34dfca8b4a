# The worker functions of test_parallel_faults.py, which run on each of several ranks (ranks.py starts them): groups
# that are destroyed, and tensors that are shared or written, while divided layers run. No test here: each worker
# returns what is wrong, as words.
import itertools
import threading

import torch
import torch.distributed as dist
from ranks import here, making_tensors_here, one_by_one

import transformer_engine.pytorch as te
from transformer_engine.pytorch import _C

from .parallel_edge_workers import said
from .parallel_modules import RECIPES
from .parallel_pool_workers import drawn, interleaved, mlps, pairs, same, usage
from .parallel_rare_workers import layer, width


def gone_groups(rank):
    """A group that is destroyed between forward and backward, or before backward_dw(): every rank raises an error
    without waiting, and the module works over another group."""
    wrong = []
    for mode, delay in itertools.product(("column", "row"), (False, True)):
        group = dist.new_group(list(range(dist.get_world_size())))
        module = layer(mode, tp_group=group, delay_wgrad_compute=delay)
        y = module(torch.randn(4, width(mode), requires_grad=True))
        if delay:
            y.sum().backward()
        dist.destroy_process_group(group)
        words = said(module.backward_dw if delay else y.sum().backward)
        wrong += [] if "destroyed" in words and words.startswith("RuntimeError") else [f"{mode} {delay}: {words}"]
        module.drop_backward_dw()
        module.set_tensor_parallel_group(dist.group.WORLD)
        module(torch.randn(4, width(mode), requires_grad=True)).sum().backward()
    return wrong


def unfit_sums(rank):
    """A main_grad that does not fit, found while the input's gradient is on its way: a good step has the bits of a
    module that never met one."""
    wrong = []
    for mode, sequence in itertools.product(("column", "row"), (True, False)):
        module = layer(mode, sequence_parallel=sequence, fuse_wgrad_accumulation=True)
        x, found = torch.randn(4, width(mode)), []
        for unfit in (True, False, False):
            module.weight.main_grad = torch.zeros(module.weight.shape)
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            if unfit:
                module.weight.main_grad = torch.zeros(3)
            words = said(y.square().sum().backward)
            if unfit != words.startswith("ValueError"):
                wrong.append(f"{mode} {sequence}: {words}")
            found.append((leaf.grad, module.weight.main_grad))
        wrong += [] if all(torch.equal(*pair) for pair in zip(*found[1:])) else [f"{mode} {sequence}: other bits"]
    return wrong


def written_inputs(rank):
    """An input that is written between forward and backward: refused where the backward reads it, on every rank."""
    wrong = []
    for mode, keep in (("column", True), ("column", False), ("row", True)):
        module = layer(mode, tp_recompute_allgather=keep)
        x = torch.randn(4, width(mode), requires_grad=True)
        h = x * 1
        y = module(h)
        with torch.no_grad():
            h.add_(1)
        words = said(y.sum().backward)
        reads = mode == "row" or keep
        wrong += [] if ("modified by an inplace operation" in words) == reads else [f"{mode} {keep}: {words}"]
        module(torch.randn(4, width(mode), requires_grad=True)).sum().backward()
    return wrong


def shared_tensors(rank):
    """One input of two layers, one layer called twice, a graph that is gone through twice, gradients that are written:
    as one after the other."""
    wrong = []
    for sequence in (True, False):
        one, two = (layer("column", sequence_parallel=sequence) for _ in range(2))
        row = layer("row", sequence_parallel=sequence)
        x = torch.randn(4, width("column"))

        def through(*columns, leaf, row=row):
            return row(sum(column(leaf) for column in columns))

        leaf = x.clone().requires_grad_()
        y = through(one, two, leaf=leaf)
        dy = torch.randn(y.shape)
        leaves = [leaf, *one.parameters(), *two.parameters(), *row.parameters()]
        first = torch.autograd.grad(y, leaves, dy, retain_graph=True)
        copies = [t.clone() for t in first]
        for t in first:
            t.fill_(torch.nan)
        again = torch.autograd.grad(y, leaves, dy)
        wrong += [] if same(copies, again) else [f"{sequence}: twice through a graph"]
        apart = [x.clone().requires_grad_() for _ in range(2)]
        parts = [column(t) for column, t in zip((one, two), apart)]
        grads = torch.autograd.grad(row(sum(parts)), [*apart, *one.parameters()], dy)
        close = torch.allclose(again[0], grads[0] + grads[1], atol=1e-5) and torch.equal(again[1], grads[2])
        wrong += [] if close else [f"{sequence}: one input of two layers"]
        twice = x.clone().requires_grad_()
        (both,) = torch.autograd.grad(row(one(twice) + one(twice * 1)), [twice], dy)
        (alone,) = torch.autograd.grad(row(one(once := x.clone().requires_grad_()) * 2), [once], dy)
        wrong += [] if torch.allclose(both, alone, atol=1e-5) else [f"{sequence}: one layer called twice"]
    return wrong


def nothing_outlives(rank):
    """No saved tensor, output, gradient or stored weight-gradient task uses memory of the pool."""
    wrong = []
    kinds, flags = (pairs, mlps), (True, False)
    for kind, recipe, recompute, delay in itertools.product(
        kinds, ("none", "current", "block", "delayed"), flags, flags
    ):
        seen = []
        module = kind(2, recompute=recompute, delay_wgrad_compute=delay)
        with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t) or t, lambda t: t):
            found = interleaved(module, drawn(rank, 2), RECIPES[recipe])
        if any(_C.is_pooled(t) for t in (*seen, *found)) or usage()[2]:
            wrong.append(f"{kind.__name__} {recipe} {recompute} {delay}")
    return wrong


def two_groups_at_once(rank):
    """Two threads, each over a group of its own. Not on CUDA, where one thread of autograd's runs both backwards, and
    gloo has it wait for what the other rank's does not get to."""
    if here().type == "cuda":
        return []
    wrong, everyone = [], list(range(dist.get_world_size()))
    groups = [dist.new_group(everyone) for _ in range(2)]
    stacks, xs = [pairs(3, tp_group=group) for group in groups], [drawn(rank, 2), drawn(rank + 7, 2)]
    wanted = [interleaved(stack, x) for stack, x in zip(stacks, xs)]
    found = [[], []]

    def work(i):
        for _ in range(5):
            found[i].append(interleaved(stacks[i], xs[i]))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for i, results in enumerate(found):
        wrong += [] if len(results) == 5 and all(same(wanted[i], result) for result in results) else [f"thread {i}"]
    return wrong


def undivided_mlp(rank):
    """A LayerNormMLP with tp_size has a part of its hidden units in any case; without set_parallel_mode the caller adds
    up, and nothing is communicated."""
    module = te.LayerNormMLP(32, 64, tp_size=2, device=here())
    before = usage()
    y = module(torch.randn(4, 32, requires_grad=True))
    y.sum().backward()
    fits = module.fc1_weight.shape == (32, 32) and module.fc2_weight.shape == (32, 32) and usage() == before
    return [] if fits else [f"{module.fc1_weight.shape} {module.fc2_weight.shape}"]


WORKERS = (
    gone_groups, unfit_sums, written_inputs, shared_tensors, nothing_outlives, two_groups_at_once, undivided_mlp,
)  # fmt: skip


def everything(rank):
    """One start of the ranks for all of them."""
    with making_tensors_here():
        return one_by_one(rank, WORKERS)
