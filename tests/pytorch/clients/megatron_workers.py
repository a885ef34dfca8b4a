"""megatron-core's DistributedDataParallel and optimizer over our modules, and the same model in one process without
either: on a CPU behind megatron_on_cpu.py, on CUDA as it is. No test is here."""

import dataclasses

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling, Float8BlockScaling, Float8CurrentScaling

from . import megatron_on_cpu

HIDDEN, OUT, SEQ, BATCH = 64, 16, 8, 16
# By megatron-core's names.
RECIPES = {"delayed": DelayedScaling, "tensorwise": Float8CurrentScaling, "blockwise": Float8BlockScaling}
ADAM = {"lr": 2e-3, "weight_decay": 0.01}


@dataclasses.dataclass(frozen=True)
class Case:
    dtype: torch.dtype = torch.bfloat16
    recipe: str | None = None
    held_in_fp8: bool = False  # and gathered as bytes
    fused: bool = True  # weight gradients are accumulated in main_grad
    sharded: bool = True  # megatron-core's distributed optimizer
    aware: bool = False  # its precision-aware one: FusedAdam keeps the masters
    overlap: bool = False


def model_of(case):
    torch.manual_seed(3)
    on = {"params_dtype": case.dtype, "device": here(), "fuse_wgrad_accumulation": case.fused}
    recipe = RECIPES[case.recipe]() if case.recipe else None
    with te.quantized_model_init(case.held_in_fp8, recipe, preserve_high_precision_init_val=True):
        layer = te.TransformerLayer(
            HIDDEN, 2 * HIDDEN, 4, hidden_dropout=0.0, attention_dropout=0.0, self_attn_mask_type="causal",
            fuse_qkv_params=True, **on,
        )  # fmt: skip
        ends = te.Linear(HIDDEN, HIDDEN, **on), te.Linear(HIDDEN, OUT, **on)
        return torch.nn.Sequential(ends[0], te.LayerNormMLP(HIDDEN, 2 * HIDDEN, **on), layer, ends[1])


def loss_of(model, case, step, rank=0, ranks=1):
    """Of this rank's sequences of a batch."""
    x = torch.randn(SEQ, BATCH, HIDDEN, generator=torch.Generator().manual_seed(step))
    wanted = 2 * x[..., :OUT]
    x, wanted = (t.chunk(ranks, 1)[rank].to(here()) for t in (x.to(case.dtype), wanted))
    recipe = RECIPES[case.recipe]() if case.recipe else None
    group = dist.group.WORLD if ranks > 1 else None
    with te.autocast(enabled=case.recipe is not None, recipe=recipe, amax_reduction_group=group):
        return (model(x).float() - wanted).square().mean()


def alone(case, steps):
    """[(loss, gradients' norm) of each step] of one process on the whole batch, with FusedAdam."""
    model = model_of(case)
    parameters = list(model.parameters())
    adam = te.optimizers.FusedAdam(parameters, **ADAM, master_weights=True, use_decoupled_grad=True)
    seen = []
    for step in range(steps):
        for p in parameters:
            p.main_grad, p.grad, p.grad_added_to_main_grad = torch.zeros(p.shape, device=p.device), None, False
        loss = loss_of(model, case, step)
        loss.backward()
        for p in parameters:
            if p.grad is not None and not p.grad_added_to_main_grad:
                p.main_grad += p.grad
            p.decoupled_grad = p.main_grad
        grads = [p.main_grad for p in parameters]
        norm = torch.nn.utils.get_total_norm(grads)
        torch._foreach_mul_(grads, (1.0 / (norm + 1e-6)).clamp(max=1.0))
        adam.step()
        seen.append((loss.item(), norm.item()))
    return seen


def wrapped(case):
    """(megatron-core's wrapper, its optimizer), called as its users call them."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer import TransformerConfig

    kind = {"bf16": case.dtype is torch.bfloat16, "params_dtype": case.dtype}
    both = {"use_distributed_optimizer": case.sharded, "overlap_param_gather": case.sharded and case.overlap}
    ddp = DistributedDataParallel(
        TransformerConfig(num_layers=1, hidden_size=HIDDEN, num_attention_heads=4, **kind),
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=case.overlap, fp8_param_gather=case.held_in_fp8,
            bucket_size=20_000 if case.overlap else None, **both,
        ),
        model_of(case),
    )  # fmt: skip
    config = OptimizerConfig(
        optimizer="adam", clip_grad=1.0, use_precision_aware_optimizer=case.aware, fp8_recipe=case.recipe,
        **ADAM, **kind, **both,
    )  # fmt: skip
    return ddp, get_megatron_optimizer(config, [ddp])


def under_megatron(rank, cases, steps):
    """Of each case [(loss of all ranks, gradients' norm) of each step], and how many weights have moved."""
    if here().type == "cpu":
        megatron_on_cpu.pretend()
        megatron_on_cpu.collectives_one_by_one()
    from megatron.core import parallel_state

    ranks = dist.get_world_size()
    parallel_state.initialize_model_parallel()
    found = {}
    for name, case in cases.items():
        ddp, optimizer = wrapped(case)
        before = [p.detach().float().clone() for p in ddp.module.parameters()]
        seen = []
        for step in range(steps):
            ddp.zero_grad_buffer()
            optimizer.zero_grad()
            loss = loss_of(ddp, case, step, rank, ranks)
            loss.backward()
            ddp.finish_grad_sync()
            applied, norm, _ = optimizer.step()
            assert applied
            mean = (loss.detach() / ranks).cpu()
            dist.all_reduce(mean)
            seen.append((mean.item(), float(norm)))
        moved = [not torch.equal(p.detach().float(), b) for p, b in zip(ddp.module.parameters(), before, strict=True)]
        found[name] = seen, all(moved)
    return found
