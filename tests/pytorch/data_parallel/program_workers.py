# Workers of test_programs.py: seeded programs of two ranks beside one process that sees the whole batch. Gradients,
# weights and momenta are whole numbers or halves of them, so that every sum is exact in any order.
import random
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)

from .cases import each, raised, whole

WIDTH, ROWS = 6, 3
PROGRAMS = 24


class Failure(Exception):
    pass


class EndsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise Failure


class Net(torch.nn.Module):
    """Each layer adds to one sum, so that no number grows with the depth. One weight is used twice, one layer may be
    left out, one may be frozen. ends: the layer whose backward raises."""

    def __init__(self, draw):
        super().__init__()
        shapes = [(WIDTH, draw.choice([1, 5, 6, 11])) for _ in range(draw.randint(2, 8))]
        self.layers = torch.nn.ModuleList(torch.nn.Linear(*s, bias=draw.random() < 0.5) for s in shapes)
        self.twice = torch.nn.Linear(WIDTH, WIDTH, bias=False)
        self.frozen = torch.nn.Parameter(torch.ones(WIDTH), requires_grad=draw.random() < 0.5)
        self.ends = None
        generator = torch.Generator().manual_seed(draw.randrange(1000))
        with torch.no_grad():
            for p in self.parameters():
                p.copy_(whole(generator, *p.shape, low=-1, high=2))

    def forward(self, x, used):
        total = self.twice(x).sum() + (2.0 * self.twice(x)).sum() + (self.frozen * x).sum()
        for i, layer in enumerate(self.layers):
            if used[i]:
                y = layer(x)
                total = total + (EndsBackward.apply(y) if self.ends == i else y).sum()
        return total


def drawn_options(draw):
    """(options of a wrapper, whether its loss is one per token): the same on both ranks."""
    mode = draw.choice(["sum", "average", "reproducible", "fp32 accumulation", "per token"])
    options = {
        "use_distributed_optimizer": draw.random() < 0.6,
        "overlap_grad_reduce": draw.random() < 0.75,
        "find_unused_parameters": draw.random() < 0.4,
        "average_in_collective": mode == "average",
        "reproducible": mode == "reproducible",
        "reduce_scatter_with_fp32_accumulation": mode == "fp32 accumulation",
        "bucket_size": draw.choice([None, 1, 40, 200]),
        "debug": draw.random() < 0.5,
    }
    options["overlap_param_gather"] = options["use_distributed_optimizer"] and draw.random() < 0.7
    return options, mode == "per token"


def batch(draw):
    """{rank: data}, drawn alike on both ranks."""
    generator = torch.Generator().manual_seed(draw.randrange(10**6))
    return [whole(generator, ROWS, WIDTH, low=-1, high=2).to(here()) for _ in range(2)]


class Program:
    def __init__(self, rank, seed):
        self.rank = rank
        self.draw = random.Random(seed)
        start = self.draw.random()
        self.dampening = self.draw.choice([0.0, 0.5])
        self.module, self.alone = (Net(random.Random(start)).to(here()) for _ in range(2))
        self.its_optimizer = self.sgd(self.alone)
        self.wrap()

    def wrap(self):
        options, self.per_token = drawn_options(self.draw)
        self.find_unused, self.overlapped = options["find_unused_parameters"], options["overlap_grad_reduce"]
        self.ddp = DistributedDataParallel(
            DistributedDataParallelConfig(**options), self.module, calculate_per_token_loss=self.per_token
        )
        self.optimizer = DistributedOptimizer(self.sgd(self.module), self.ddp)

    def wrap_again(self, folder):
        """Maybe a part alone before the whole, with other options; the momentum goes on from a file."""
        self.save(folder)
        if self.draw.random() < 0.5:
            part = self.draw.choice([*self.module.layers, self.module.twice])
            DistributedDataParallel(DistributedDataParallelConfig(), part)
            for name, p in self.module.named_parameters():
                assert torch.equal(p, self.alone.state_dict()[name]), f"{name} after a part was wrapped again"
            for call in (self.ddp.zero_grad_buffer, self.optimizer.zero_grad, self.optimizer.step):
                assert "was wrapped again" in raised(RuntimeError, call)
        self.wrap()
        self.load(folder)

    def sgd(self, module):
        params = [p for p in module.parameters() if p.requires_grad]
        return te.optimizers.FusedSGD(params, lr=2.0**-10, momentum=0.5, dampening=self.dampening)

    def used(self):
        """[of each rank: which layers it uses]: all, unless parameters may be left out."""
        count = len(self.module.layers)
        if not self.find_unused:
            return [[True] * count for _ in range(2)]
        return [[self.draw.random() < 0.7 for _ in range(count)] for _ in range(2)]

    def fail(self):
        """A backward ends in another layer on each rank, after its first gradient and before its last; then all ranks
        begin again."""
        count, used = len(self.module.layers), self.used()
        layers = [self.draw.randrange(count - 1) for _ in range(2)]
        for its, ends in zip(used, layers):
            its[ends] = its[-1] = True
        held_back, xs = self.draw.random() < 0.3, batch(self.draw)
        if not self.overlapped:
            return
        self.module.ends = layers[self.rank]
        try:
            if held_back:
                with self.ddp.no_sync():
                    self.ddp(xs[self.rank], used[self.rank]).backward()
            else:
                self.ddp(xs[self.rank], used[self.rank]).backward()
        except Failure:
            pass
        else:
            raise AssertionError("no exception")
        finally:
            self.module.ends = None
        self.optimizer.zero_grad()

    def step(self):
        draw = self.draw
        self.optimizer.zero_grad()
        if draw.random() < 0.2:
            self.ddp.zero_grad_buffer()
        if draw.random() < 0.4:
            self.fail()
        total = {n: torch.zeros_like(p) for n, p in self.alone.named_parameters() if p.requires_grad}
        microbatches = draw.randint(1, 4)
        all_held_back = draw.random() < 0.15
        for microbatch in range(microbatches):
            xs, used = batch(draw), self.used()
            synchronized = microbatch == microbatches - 1 and not all_held_back
            if synchronized:
                self.ddp(xs[self.rank], used[self.rank]).backward()
            else:
                with self.ddp.no_sync():
                    self.ddp(xs[self.rank], used[self.rank]).backward()
            for x, its in zip(xs, used):
                self.alone.zero_grad()
                self.alone(x, its).backward()
                for n, p in self.alone.named_parameters():
                    if p.grad is not None:
                        total[n] += p.grad
        for n, p in self.alone.named_parameters():
            if p.requires_grad:
                p.grad = total[n] if self.per_token else total[n] / 2
        if draw.random() < 0.3:
            self.ddp.finish_grad_sync()
        if draw.random() < 0.15:  # a step that is not taken
            if not self.overlapped or draw.random() < 0.5:
                self.ddp.finish_grad_sync()
            self.optimizer.zero_grad()
            return
        self.optimizer.step()
        self.its_optimizer.step()

    def compare(self, what):
        state = self.ddp.state_dict()
        for name, wanted in self.alone.state_dict().items():
            assert torch.equal(state[name], wanted), f"{what}: {name}: {state[name]}, wanted {wanted}"

    def state(self):
        return {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=folder)

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=folder)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def save_and_load(self, folder):
        """The wrapper goes on from its file."""
        self.save(folder)
        with torch.no_grad():
            for buffer in self.ddp.buffers:
                if buffer.param_data is not None:
                    buffer.param_data.fill_(7.0)
        self.load(folder)

    def run(self, folder):
        for number in range(5):
            self.step()
            if self.draw.random() < 0.5:
                self.compare(f"step {number}")
            if self.draw.random() < 0.15:
                self.save_and_load(f"{folder}/{number}")
            if self.draw.random() < 0.15:
                self.wrap_again(f"{folder}/again{number}")
        self.compare("the end")


def one_program(rank, ranks, seed):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    Program(rank, seed).run(Path(folder[0]))


def programs(rank, ranks):
    return each(rank, ranks, {f"seed {seed}": (one_program, (seed,)) for seed in range(PROGRAMS)})
