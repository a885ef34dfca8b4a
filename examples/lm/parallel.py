"""The model divided over the ranks of a tensor-parallel group: the rows of the vocabulary of each rank, the loss of all
tokens, the norm of the whole gradient, and whole tensors for a checkpoint. A single rank communicates nothing."""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist

# Imported here, before a group exists: if it were imported later, its functions would hold the group of that time, and
# that group's threads would outlive destroy_process_group().
import torch.distributed.nn
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import transformer_engine.pytorch as te
from transformer_engine.pytorch import distributed
from transformer_engine.pytorch.distributed import CudaRNGStatesTracker

from .config import VOCAB, Config, ExampleError


@dataclass(frozen=True)
class Ranks:
    """The group that one model is divided over, and this process's place in it; replicas: groups of that kind, each of
    which trains on a part of the windows."""

    group: dist.ProcessGroup | None = None
    size: int = 1
    rank: int = 0
    sequence_parallel: bool = False
    recompute_allgather: bool = True
    tracker: CudaRNGStatesTracker | None = None
    replicas_group: dist.ProcessGroup | None = None  # of the processes with this process's part of the model
    replicas: int = 1
    replica: int = 0

    @property
    def is_first(self) -> bool:
        """Whether this process prints and writes for all."""
        return self.rank == self.replica == 0

    def layer_options(self) -> dict:
        """The arguments of a TransformerLayer."""
        if self.size == 1:
            return {"attn_input_format": "bshd"}
        # Sequence parallelism divides dimension 0, which must be that of positions.
        return {
            "attn_input_format": "sbhd",
            "set_parallel_mode": True,
            "tp_group": self.group,
            "sequence_parallel": self.sequence_parallel,
            "tp_recompute_allgather": self.recompute_allgather,
            "get_rng_state_tracker": lambda: self.tracker,
        }

    def head_options(self) -> dict:
        """The arguments of the head, which computes this rank's columns of the logits."""
        if self.size == 1:
            return {}
        options = {**self.layer_options(), "parallel_mode": "column"}
        return {
            name: value for name, value in options.items() if name not in ("attn_input_format", "set_parallel_mode")
        }

    # ---- the vocabulary, whose rows the ranks share ----

    def draw_rows(self, init: Callable, weight: nn.Parameter) -> None:
        """Initial values of this rank's rows, and the marks that modules set on their parameters."""
        if self.size == 1:
            init(weight)
            return
        weight.tensor_model_parallel, weight.partition_dim, weight.partition_stride = True, 0, 1
        with self.tracker.fork():
            init(weight)

    def own_rows(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Indices into this rank's rows of the vocabulary, and a mask of the valid ones: tokens of other ranks get any
        index."""
        rows = VOCAB // self.size
        ids = ids - self.rank * rows
        return ids.clamp(0, rows - 1), (ids >= 0) & (ids < rows)

    def embed(self, tokens: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """int64 [batch, seq] -> embeddings [seq, batch, hidden]; with sequence parallelism only this rank's
        positions."""
        self.before_reading(weight)
        rows, own = self.own_rows(tokens.t())
        part = F.embedding(rows, weight) * own.unsqueeze(-1)
        if self.sequence_parallel:
            return distributed.reduce_scatter_to_sequence_parallel_region(part, self.group)
        return distributed.reduce_from_tensor_model_parallel_region(part, self.group)

    def cross_entropy(self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Mean loss of all tokens for a head with this rank's rows of the vocabulary, the same on every rank. hidden
        [batch, seq, ...], divided [seq, batch, ...], with sequence parallelism only this rank's positions; targets
        [batch, seq], all positions."""
        self.before_reading(weight)
        return te.fused_linear_cross_entropy(
            hidden,
            weight,
            targets if self.size == 1 else targets.t(),
            dist_process_group=self.group,
            sequence_parallel=self.sequence_parallel,
        )

    @torch.no_grad()
    def next_logits(self, model: nn.Module, window: torch.Tensor) -> torch.Tensor:
        """[VOCAB] logits after a window [1, positions]."""
        if self.size == 1:
            return model(window)[0, -1]
        last = window.shape[1] - 1
        pad = -window.shape[1] % self.size if self.sequence_parallel else 0  # a causal mask hides later positions
        part = model(F.pad(window, (0, pad)))[last, 0].contiguous()
        logits = part.new_empty(VOCAB)
        dist.all_gather_into_tensor(logits, part, group=self.group)
        return logits

    # ---- gradients and decisions ----

    def finish_gradients(self, model: nn.Module) -> None:
        """Call it after the last backward: if tokens are divided, gradients of norms are sums over one rank's
        tokens."""
        if self.size > 1:
            distributed.allreduce_sequence_parallel_grads(model, self.group)

    def any(self, requested: bool) -> bool:
        """Whether any rank requests it: all ranks must leave a loop in the same step."""
        if self.size * self.replicas == 1:
            return requested
        flag = torch.tensor([int(requested)])
        dist.all_reduce(flag, dist.ReduceOp.MAX)
        return bool(flag)

    def wait(self) -> None:
        """Waits for all ranks."""
        self.any(False)

    def before_reading(self, weight: torch.Tensor) -> None:
        """Call it where a weight is read without a call of its module, which would wait for the gather."""
        if self.replicas > 1:
            distributed.ensure_params_ready([weight])

    def own_windows(self, tokens: torch.Tensor) -> torch.Tensor:
        """This replica's part of a step's windows."""
        return tokens.chunk(self.replicas)[self.replica]

    def mean_over_replicas(self, value: torch.Tensor) -> torch.Tensor:
        if self.replicas > 1:
            dist.all_reduce(value := value / self.replicas, group=self.replicas_group)
        return value

    # ---- checkpoints: whole tensors, that any number of ranks can read ----

    def shape(self, parameter: nn.Parameter | None, shape: torch.Size) -> list[int]:
        """Shape of the whole tensor."""
        whole = list(shape)
        if is_divided(parameter):
            whole[parameter.partition_dim] *= self.size
        return whole

    def whole(self, tensors: Mapping[str, torch.Tensor], parameters: Mapping[str, nn.Parameter]) -> dict:
        """Every tensor of a checkpoint, gathered. parameters: see parameter_of."""
        if self.size == 1:
            return dict(tensors)
        result = {}
        for name, tensor in tensors.items():
            parameter = parameter_of(name, parameters)
            if is_divided(parameter):
                shards = [torch.empty_like(tensor) for _ in range(self.size)]
                dist.all_gather(shards, tensor.contiguous(), group=self.group)
                dim, parts = parameter.partition_dim, stacked_in(name)
                cut = zip(*(shard.chunk(parts, dim) for shard in shards), strict=True)
                tensor = torch.cat([shard for part in cut for shard in part], dim)
            result[name] = tensor.cpu()
        return result

    def own(self, name: str, parameter: nn.Parameter | None, whole: torch.Tensor) -> torch.Tensor:
        """This rank's part of a whole tensor."""
        if self.size == 1 or not is_divided(parameter):
            return whole
        dim = parameter.partition_dim
        return torch.cat([part.chunk(self.size, dim)[self.rank] for part in whole.chunk(stacked_in(name), dim)], dim)


ALONE = Ranks()


def is_divided(parameter: nn.Parameter | None) -> bool:
    """Whether each rank has a part of the parameter. Every rank has all other parameters whole, and they stay equal."""
    return getattr(parameter, "tensor_model_parallel", False)


def stacked_in(name: str) -> int:
    """Number of matrices that are stacked in one and divided separately: gate and up in an MLP's first."""
    return 2 if name.endswith("fc1_weight") else 1


def parameter_of(name: str, parameters: Mapping[str, nn.Parameter]) -> nn.Parameter | None:
    """The parameter of a checkpoint's tensor: "model.<parameter>", "optimizer.<state>.<parameter>", or none."""
    kind, _, rest = name.partition(".")
    return parameters.get(rest if kind == "model" else rest.partition(".")[2])


@contextlib.contextmanager
def joined(config: Config, device: torch.device) -> Iterator[Ranks]:
    """The rank of this process among those that torchrun, or the caller, has started; rank 0 prints for all."""
    started, ours = dist.is_initialized(), False
    if not started and dist.is_torchelastic_launched():
        # gloo on the CPU besides NCCL: for checkpoints and Ctrl-C. NCCL refuses processes that share a device; gloo
        # carries their tensors too.
        shared = int(os.environ.get("LOCAL_WORLD_SIZE", 1)) > torch.cuda.device_count()
        dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" and not shared else "gloo")
        started = ours = True
    size = dist.get_world_size() if started else 1
    check_processes(config, size)
    if size == 1:
        yield ALONE
    else:
        ranks = ranks_of(config, device)
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(sys.stdout if ranks.is_first else nowhere):
            yield ranks
    if ours:
        dist.destroy_process_group()


def check_processes(config: Config, size: int) -> None:
    if config.data_parallel:
        shared = config.batch // config.accumulate
        if size % config.tp or shared % (size // config.tp):
            raise ExampleError(
                f"--data-parallel, --tp {config.tp}: there are {size} processes, wanted a multiple of {config.tp} "
                f"whose replicas divide the {shared} windows of a microbatch"
            )
    elif size != config.tp:
        raise ExampleError(
            f"--tp {config.tp}: this example divides one model over all processes, of which there are {size}: start it "
            f"by `torchrun --nproc-per-node={config.tp}`, or give --tp {size}, or --data-parallel"
        )


def ranks_of(config: Config, device: torch.device) -> Ranks:
    """Neighbours share a model."""
    replicas = dist.get_world_size() // config.tp
    mesh = init_device_mesh(device.type, (replicas, config.tp), mesh_dim_names=("dp", "tp"))
    replica, rank = mesh.get_coordinate()
    tracker = CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", config.seed + 1 + rank)  # each rank draws its own parts of divided parameters
    options = config.sequence_parallel, config.recompute_allgather, tracker, mesh.get_group("dp"), replicas, replica
    return Ranks(mesh.get_group("tp") if config.tp > 1 else None, config.tp, rank, *options)


def memory_of_modes(model: nn.Module, loss: Callable, layer: nn.Module, inputs: tuple, options: dict) -> str:
    """The memory that a layer keeps for its backward with gathered inputs recomputed and with gathered inputs kept, and
    on CUDA the peak of a forward and backward of the model."""
    gathering = [m for m in model.modules() if hasattr(m, "tp_recompute_allgather")]
    before, kept, peaks = [m.tp_recompute_allgather for m in gathering], [], []
    for recompute in (True, False):
        for module in gathering:
            module.tp_recompute_allgather = recompute
        kept.append(te.memory_plan(layer, *inputs, **options).kept_bytes)
        if inputs[0].is_cuda:
            torch.cuda.reset_peak_memory_stats()
            loss().backward()
            peaks.append(torch.cuda.max_memory_allocated())
            model.zero_grad(set_to_none=True)
    for module, recompute in zip(gathering, before, strict=True):
        module.tp_recompute_allgather = recompute
    kept, peaks = ([f"{size / 2**20:,.2f}" for size in sizes] for sizes in (kept, peaks))
    peak = f"; peak of a forward and backward {peaks[0]} and {peaks[1]} MiB" if peaks else ""
    return f"each rank keeps {kept[0]} MiB of a layer, and {kept[1]} MiB with --no-recompute-allgather{peak}"
