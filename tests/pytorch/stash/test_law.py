# The law of memory (docs/guide/stash.md) on stacks of MoEMLPs, 1 to 16 layers with buffers of 1 to 8 times the rows of
# an even routing. With S bytes of a group of all live rows and equal experts:
#     static  = layers * capacity * S
#     stashed = sets * capacity * S + factor * live bytes of the groups that leave
# A tiny stack's other memory is more than its groups. The law is measured by differences, in which that cancels:
# between stacks of more and fewer layers, and between buffers. Pages are small here, and 36 bytes of tables for each.
import gc
import itertools

import pytest
import torch
from support import randn

from moe.blocks import Config, MoEStack
from moe.memory import peak_bytes

from .cases import made

PAGE, FACTOR = 2048, 1.2
LAYERS, CAPACITIES = (1, 2, 4, 8, 16), (2.0, 4.0, 8.0)
FEW, MANY = 4, 16
NEAR = 0.05

pytestmark = pytest.mark.filterwarnings("ignore:.*stashing costs memory")


class Stack:
    def __init__(self, device, layers, capacity, stash=None, save_preactivation=None):
        self.config = Config(layers, 512, 64, 512, 16, 2, 2, capacity, save_preactivation)
        self.device, self.stash = torch.device(device), stash
        torch.manual_seed(0)
        self.model = MoEStack(self.config, self.device, stash, fuse_wgrad_accumulation=True)
        self.model.skew("balanced")
        for p in self.model.parameters():  # gradients that stay, so that a step's peak has none of its own
            p.main_grad, p.grad = torch.zeros_like(p, dtype=torch.float32), torch.zeros_like(p)
        self.x, self.dy = (randn(512, 64, device=device, dtype=torch.bfloat16) for _ in range(2))
        self.x.requires_grad_().grad = torch.zeros_like(self.x)
        self.step()

    def step(self):
        if self.stash is not None:
            self.stash.reset()
        self.model(self.x).backward(self.dy)

    def peak(self):
        gc.collect()
        return peak_bytes(self.step, self.device)


def stashed(device, layers, capacity, save_preactivation=None, *, peak=True):
    """Bytes at the peak, those of the pool, and live bytes of the groups that leave; and the stack's sizes."""
    with made(device, page_bytes=PAGE, device_pages=None, host_pages=0, factor=FACTOR) as stash:
        stack = Stack(device, layers, capacity, stash, save_preactivation)
        stash.reset()  # makes the pool, of the first step's size
        most = stack.peak() if peak else stack.step()
        pool = stash.plan().device_pages * PAGE
        report = stash.verdict(wait=True).report or {"live_bytes": 0, "flags": 0}
        assert report["flags"] == 0
        return (most or 0) + pool, pool, report["live_bytes"], stack.config


def test_the_pool_is_that_of_live_rows(device):
    """Whatever the buffers: the pages of the groups that leave, times the factor."""
    pools = {}
    for layers, capacity in itertools.product(LAYERS, CAPACITIES):
        _, pool, live, config = stashed(device, layers, capacity, peak=False)
        assert FACTOR * live <= pool <= FACTOR * (live + PAGE * layers) + PAGE
        balanced = (layers - 1) * config.balanced_rows * config.row_bytes  # the last layer stays
        assert (live == 0) == (layers == 1) and abs(live - balanced) <= 0.2 * balanced
        pools.setdefault(layers, set()).add((pool, live))
    assert all(len(of_layers) == 1 for of_layers in pools.values()), pools


def test_the_law(device):
    more = MANY - FEW
    static = {(n, c): Stack(device, n, c).peak() for n in (FEW, MANY) for c in (2.0, 8.0)}
    one = Stack(device, 1, 1.0).config
    group = one.balanced_rows * one.row_bytes
    grows = {c: static[MANY, c] - static[FEW, c] for c in (2.0, 8.0)}
    assert abs((grows[8.0] - grows[2.0]) / (more * 6 * group) - 1) < NEAR
    for save_preactivation, capacities in ((None, (2.0, 8.0)), ("fp8", (8.0,))):
        for capacity in capacities:
            (low, _, live, _), (high, _, most_live, _) = (
                stashed(device, n, capacity, save_preactivation) for n in (FEW, MANY)
            )
            outside = grows[capacity] - more * capacity * group  # of groups, what a layer keeps in both ways
            grown, law = high - low - outside, FACTOR * (most_live - live)
            assert abs(grown / law - 1) < NEAR, (save_preactivation, capacity, grown, law)
