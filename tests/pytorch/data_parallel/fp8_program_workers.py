# Workers of test_programs.py: seeded programs of weights that are held in FP8, experts and plain layers over ranks,
# beside one process in plain torch. Every gradient is a sum of products of whole numbers, which FP8 and any order of
# sums keep: the inputs' and the outputs' gradients have the largest value 7, and 448 / 7 is a power of two.
import contextlib
import random
import tempfile

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

from .cases import RECIPES, each, whole
from .pitched_workers import bytes_of

FP8_PROGRAMS = 12
LR, BETAS, EPS, DECAY = 2.0**-6, (0.5, 0.75), 1.0, 2.0**-4  # by so large an eps a factor of all gradients is seen
ROWS = 16


class Part:
    """A layer that reads the input; its loss is the sum of its output times given whole numbers."""

    def __init__(self, draw, width, held, expert):
        self.kind = draw.choice(["linear", "grouped"]) if expert else draw.choice(["linear", "linear", "plain"])
        self.width, self.out = width, draw.choice([8, 16, 24, 33, 48])
        self.twice = draw.random() < 0.25
        self.held, self.expert = held and self.kind != "plain", expert
        self.options = {
            "bias": draw.random() < 0.4 and self.kind != "grouped",
            "fuse_wgrad_accumulation": draw.random() < 0.6,
            "delay_wgrad_compute": draw.random() < 0.3,
        }

    def make(self):
        if self.kind == "plain":
            return torch.nn.Linear(self.width, self.out, bias=self.options["bias"], device=here())
        options = {**self.options, "params_dtype": torch.bfloat16, "device": here()}
        if self.kind == "grouped":
            layer = te.GroupedLinear(2, self.width, self.out, **options)
        else:
            layer = te.Linear(self.width, self.out, **options)
        for p in layer.parameters():
            p.allreduce = not self.expert
        return layer

    def run(self, layer, x, recipe):
        x = x.to(torch.float32 if self.kind == "plain" else torch.bfloat16)
        args = ([ROWS // 2] * 2,) if self.kind == "grouped" else ()
        context = contextlib.nullcontext()
        if recipe is not None and self.kind != "plain":
            context = te.autocast(recipe=RECIPES[recipe]())
        with context:
            return layer(x, *args) + (layer(x, *args) if self.twice else 0)

    def gradients(self, names, x, outs):
        """{name: gradient of a microbatch of one rank}."""
        outs = outs[:, : self.out].double() * (2.0 if self.twice else 1.0)
        found = {}
        for name in names:
            if name.endswith("bias"):
                found[name] = outs.sum(0)
            elif self.kind == "grouped":
                rows = slice(0, ROWS // 2) if name.endswith("0") else slice(ROWS // 2, None)
                found[name] = outs[rows].t() @ x[rows].double()
            else:
                found[name] = outs.t() @ x.double()
        return found


class Net(torch.nn.Module):
    def __init__(self, parts, recipe):
        super().__init__()
        self.parts, self.recipe = parts, recipe
        self.layers = torch.nn.ModuleList()
        for part in parts:
            used = RECIPES[recipe or "current"]()
            with te.quantized_model_init(part.held, used, preserve_high_precision_init_val=True):
                self.layers.append(part.make())

    def forward(self, x, outs):
        total = 0.0
        for part, layer in zip(self.parts, self.layers):
            y = part.run(layer, x, self.recipe)
            total = total + (y * outs[:, : part.out].to(y.dtype)).float().sum()
        return total

    def backward_dw(self):
        for part, layer in zip(self.parts, self.layers):
            if part.kind != "plain" and part.options["delay_wgrad_compute"]:
                for _ in range(2 if part.twice else 1):
                    layer.backward_dw()


class Alone:
    """The optimizer in plain torch, of one parameter; its float64 gradient is given."""

    def __init__(self, value):
        self.master, self.m, self.v = value.double(), torch.zeros_like(value.double()), torch.zeros_like(value.double())

    def step(self, grad, count):
        self.m = BETAS[0] * self.m + (1 - BETAS[0]) * grad
        self.v = BETAS[1] * self.v + (1 - BETAS[1]) * grad * grad
        m, v = self.m / (1 - BETAS[0] ** count), self.v / (1 - BETAS[1] ** count)
        self.master = self.master - LR * (m / (v.sqrt() + EPS) + DECAY * self.master)


class Program:
    def __init__(self, rank, ranks, seed):
        self.rank, self.ranks, self.draw = rank, ranks, random.Random(seed)
        draw = self.draw
        self.recipe = draw.choice([None, "current", "current", "block", "delayed"])
        self.width = draw.choice([24, 32, 33, 40, 48])
        self.has_experts = draw.random() < 0.4
        held = [self.recipe is not None and draw.random() < 0.75 for _ in range(draw.randint(1, 4))]
        self.parts = [Part(draw, self.width, h, False) for h in held]
        if self.has_experts:
            is_held = self.recipe is not None and draw.random() < 0.6
            self.parts += [Part(draw, self.width, is_held, True) for _ in range(draw.randint(1, 2))]
        count = 2 if ranks == 4 else ranks
        self.groups = [[r for r in range(ranks) if r % count == i] for i in range(count)]
        self.made_groups = [dist.new_group(g) for g in self.groups] if self.has_experts else []
        self.own_group = rank % count
        torch.manual_seed(seed)
        self.module = Net(self.parts, self.recipe)
        self.generator = torch.Generator().manual_seed(seed)
        self.names = [n for n, _ in self.module.named_parameters()]
        self.is_expert = {n: not getattr(p, "allreduce", True) for n, p in self.module.named_parameters()}
        self.alone = {}
        for n, p in self.module.named_parameters():
            first = p.get_high_precision_init_val() if hasattr(p, "_gathered") else p.detach()
            self.alone[n] = [Alone(first.to(here()).clone()) for _ in (self.groups if self.is_expert[n] else [None])]
        self.count, self.scaler = 0, None  # of steps that were taken
        self.clip = draw.choice([0.0, 4.0, 40.0, 1e4])
        if draw.random() < 0.4:
            self.scaler = torch.amp.GradScaler(here().type, init_scale=2.0 ** draw.randint(1, 8), growth_interval=10**6)
        self.wrap()

    def wrap(self):
        draw = self.draw
        sharded = draw.random() < 0.8
        mode = draw.choice(["sum", "average", "reproducible"])
        options = {
            "grad_reduce_in_fp32": True,
            "use_distributed_optimizer": sharded,
            "overlap_grad_reduce": draw.random() < 0.75,
            "overlap_param_gather": sharded and draw.random() < 0.7,
            "average_in_collective": mode == "average",
            "reproducible": mode == "reproducible",
            "bucket_size": draw.choice([None, 1, 500, 1500]),
            "debug": draw.random() < 0.5,
            "check_for_nan_in_grad": False,
        }
        self.per_token = mode == "sum" and draw.random() < 0.3
        self.ddp = DistributedDataParallel(
            DistributedDataParallelConfig(**options),
            self.module,
            expert_process_group=self.made_groups[self.own_group] if self.has_experts else None,
            calculate_per_token_loss=self.per_token,
        )
        adam = te.optimizers.FusedAdam(
            self.module.parameters(), lr=LR, betas=BETAS, eps=EPS, weight_decay=DECAY, master_weights=True
        )
        by_group = options["overlap_param_gather"] and draw.random() < 0.4
        self.optimizer = DistributedOptimizer(
            adam, self.ddp, clip_grad=self.clip, overlap_param_gather_with_optimizer_step=by_group
        )

    def batch(self):
        """[(input, factors of the outputs) of each rank]."""
        found = []
        for _ in range(self.ranks):
            x = whole(self.generator, ROWS, self.width, low=-1, high=2)  # bfloat16 gradients are exact up to 256
            outs = whole(self.generator, ROWS, 48, low=-1, high=2)
            x[:: ROWS // 2, 0] = outs[:: ROWS // 2, 0] = 7.0
            found.append((x.to(here()), outs.to(here())))
        return found

    def microbatch(self, is_last, factor):
        data = self.batch()
        x, outs = data[self.rank]
        with contextlib.nullcontext() if is_last else self.ddp.no_sync():
            loss = self.ddp(x, outs) * factor
            if self.scaler is not None:
                loss = self.scaler.scale(loss)
            loss.backward()
            self.module.backward_dw()
        return data

    def sums(self, data):
        """{name: [gradient of one microbatch, of each expert group or of all ranks]}."""
        found = {}
        for i, part in enumerate(self.parts):
            names = [n for n in self.names if n.startswith(f"layers.{i}.")]
            of_ranks = [part.gradients(names, x, outs) for x, outs in data]
            for n in names:
                groups = self.groups if self.is_expert[n] else [range(self.ranks)]
                found[n] = [sum(of_ranks[r][n] for r in group) for group in groups]
        return found

    def step(self):
        draw = self.draw
        self.optimizer.zero_grad()
        microbatches = draw.randint(1, 3)
        skip = draw.choice(["", "", "", "", "flag", "inf"])
        if skip == "inf" and (self.scaler is None or self.recipe == "delayed"):
            skip = ""
        victim = draw.randrange(self.ranks)
        total = {n: [torch.zeros_like(a.master) for a in alone] for n, alone in self.alone.items()}
        for k in range(microbatches):
            is_last = k == microbatches - 1
            factor = torch.inf if skip == "inf" and is_last and victim == self.rank else 1.0
            for n, parts in self.sums(self.microbatch(is_last, factor)).items():
                for sum_, part in zip(total[n], parts, strict=True):
                    sum_ += part
        if draw.random() < 0.2:
            self.ddp.finish_grad_sync()
        scale = 1.0 if self.per_token else 1.0 / self.ranks
        if draw.random() < 0.15 and skip != "inf":
            self.ddp.finish_grad_sync()
            self.ddp.scale_gradients(0.5)
            scale *= 0.5
        self.optimizer.found_inf = None
        if skip == "flag" or draw.random() < 0.2:
            self.optimizer.found_inf = torch.tensor(float(skip == "flag" and victim == self.rank), device=here())
        if self.scaler is None:
            norm = self.optimizer.step()
        else:
            before = self.scaler.get_scale()
            norm = self.scaler.step(self.optimizer)
            self.scaler.update()
            assert self.scaler.get_scale() == before / (2.0 if skip else 1.0), "GradScaler"
        if skip:
            return skip
        self.count += 1
        squares = [(g * scale).square().sum() for parts in total.values() for g in parts]
        wanted = torch.stack(squares).sum().sqrt()
        assert abs(norm.double() - wanted) <= 1e-6 * wanted, f"norm {norm}, wanted {wanted}"
        if self.clip:
            scale = scale * min(1.0, self.clip / (float(wanted) + 1e-6))
        for n, parts in total.items():
            for alone, g in zip(self.alone[n], parts, strict=True):
                alone.step(g * scale, self.count)
        return "taken"

    def masters(self):
        """{name: the whole float32 master}, from the ranks' shards."""
        found = {}
        for number, shards in enumerate(self.optimizer._shards):
            local = {s.param: i for i, s in enumerate(shards)}
            for n, p in self.module.named_parameters():
                value = torch.zeros(p.numel(), dtype=torch.float32, device=here())
                group = self.ddp.param_to_bucket_group[p]
                if p in local:
                    shard = shards[local[p]]
                    state = self.optimizer._steps.state_of(number, local[p])
                    value[shard.start : shard.end] = state.get("master_param", shard.weight).reshape(-1)
                if group.is_sharded and group.comm.size > 1:
                    dist.all_reduce(value, group=group.comm.group)
                found[n] = value.view(p.shape)
        return found

    def compare(self, what):
        masters = self.masters()
        self.ddp.state_dict()  # waits for gathers
        for n, p in self.module.named_parameters():
            got, which = masters[n], self.own_group if self.is_expert[n] else 0
            wanted = self.alone[n][which].master
            far = (got.double() - wanted).abs() - 2e-5 * wanted.abs()
            assert far.max() <= 1e-6, f"{what}: {n}: {got.flatten()[:4]}, wanted {wanted.flatten()[:4]}"
            if not hasattr(p, "_gathered"):
                assert torch.equal(p.detach(), got.to(p.dtype)), f"{what}: {n} is not its master"
                continue
            self.compare_bytes(f"{what}: {n}", p, got.to(torch.bfloat16).float())

    def compare_bytes(self, what, p, value):
        amax = value.abs().amax()
        if self.recipe == "block":  # each weight is one block
            inv = p._rowwise_scale_inv.repeat_interleave(128, 0).repeat_interleave(128, 1)[: p.shape[0], : p.shape[1]]
            assert 224.0 < amax / inv[0, 0] <= 448.0, f"{what}: scale {inv[0, 0]} of {amax}"
        else:
            inv = p._scale_inv
        scale = torch.full_like(amax, 448.0) / amax if self.recipe == "current" else inv.reciprocal()
        if self.recipe == "current":
            assert abs(inv * scale - 1.0) <= 2.0**-22, f"{what}: scale {inv} of {amax}"
        wanted = (value * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn).view(torch.uint8)
        off = (bytes_of(p).int() - wanted.int()).abs()
        # A scale under delayed scaling may be no reciprocal of its inverse.
        most = max(2.0, 0.02 * p.numel()) if self.recipe == "delayed" else 0.0
        assert off.sum() <= most, f"{what}: {off.sum()} bytes"
        columns = p.get_data_tensors(rowwise_data=True, columnwise_data=True)[1]
        assert columns is None or torch.equal(columns, bytes_of(p).t()), f"{what}: columns"

    def go_on(self, folder):
        """From a file, in a new wrapper of other options; experts that differ between ranks keep their own."""
        if self.has_experts:
            self.optimizer.load_state_dict(self.optimizer.state_dict())
            return
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        dcp.save(state, checkpoint_id=folder)
        for p in self.module.parameters():
            if not hasattr(p, "_gathered"):
                p.data.fill_(3.0)
        if self.draw.random() < 0.5 and self.recipe != "delayed":  # whose _extra_state has no size before a forward
            self.module = Net(self.parts, self.recipe)
        self.wrap()
        state = {"model": self.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        self.module.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])

    def run(self, folder):
        for number in range(6):
            did = self.step()
            if self.draw.random() < 0.6:
                self.compare(f"step {number} ({did})")
            if self.draw.random() < 0.2:
                self.go_on(f"{folder}/{number}")
        self.compare("the end")


def one_program(rank, ranks, seed):
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder, 0)
    Program(rank, ranks, seed).run(folder[0])


def programs(rank, ranks, seeds=range(FP8_PROGRAMS)):
    return each(rank, ranks, {f"FP8, seed {seed}": (one_program, (seed,)) for seed in seeds})
