#!/usr/bin/env python
"""megatron-core's GPT, data-parallel gradients and optimizer, unmodified, on our layers: its layer spec for
Transformer Engine imports transformer_engine.pytorch and finds this library.

torchrun --nproc-per-node=1 examples/with_megatron_core.py                      needs the extra `megatron`, and a GPU
torchrun --nproc-per-node=1 examples/with_megatron_core.py --fp8 delayed        or tensorwise, blockwise
torchrun --nproc-per-node=2 examples/with_megatron_core.py --tp 2               with sequence parallelism
torchrun --nproc-per-node=2 examples/with_megatron_core.py --experts 4 --ep 2   a mixture, its experts over ranks
Learns to repeat a short sequence; prints the loss and the classes of ours in the model."""

import argparse
import os
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `extras`, also under PYTHONSAFEPATH

import torch

from extras import need


def config_of(args):
    """The configuration that a user of megatron-core writes; only the layer spec below names Transformer Engine."""
    fp8 = {"fp8": "hybrid", "fp8_recipe": args.fp8} if args.fp8 else {}
    if args.fp8 == "blockwise":
        fp8["fp8"] = "e4m3"
    moe = {}
    if args.experts:
        moe = {
            "num_moe_experts": args.experts,
            "moe_grouped_gemm": True,
            "moe_router_topk": 2,
            "moe_token_dispatcher_type": "alltoall",
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 1e-2,
            "moe_permute_fusion": False,
            "moe_ffn_hidden_size": args.hidden * 2,
            "expert_model_parallel_size": args.ep,
        }
    return need("megatron.core.transformer", "megatron").TransformerConfig(
        num_layers=args.layers, hidden_size=args.hidden, ffn_hidden_size=args.hidden * 2, num_attention_heads=4,
        num_query_groups=2, normalization="RMSNorm", gated_linear_unit=True, activation_func=torch.nn.functional.silu,
        add_bias_linear=False, hidden_dropout=0.0, attention_dropout=0.0, bf16=True, params_dtype=torch.bfloat16,
        pipeline_dtype=torch.bfloat16, tensor_model_parallel_size=args.tp, sequence_parallel=args.tp > 1,
        bias_activation_fusion=False, gradient_accumulation_fusion=False, **fp8, **moe,
    )  # fmt: skip


def build(args, device):
    """The model under megatron-core's own DistributedDataParallel, and its optimizer."""
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_with_transformer_engine_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=args.tp, expert_model_parallel_size=args.ep, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(1234)
    config = config_of(args)
    spec = get_gpt_layer_with_transformer_engine_spec(
        num_experts=args.experts or None, moe_grouped_gemm=bool(args.experts)
    )
    model = GPTModel(
        config, spec, vocab_size=args.vocab, max_sequence_length=args.sequence, position_embedding_type="rope"
    )
    model = model.to(device=device, dtype=torch.bfloat16)
    whole = DistributedDataParallel(
        config,
        DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=args.distributed_optimizer, overlap_grad_reduce=True
        ),
        model,
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.no_sync_func = whole.no_sync
    optimizer = get_megatron_optimizer(
        OptimizerConfig(
            optimizer="adam", lr=2e-3, weight_decay=0.0, bf16=True, params_dtype=torch.bfloat16, clip_grad=1.0,
            use_distributed_optimizer=args.distributed_optimizer,
        ),
        [whole],
    )  # fmt: skip
    return whole, optimizer


def forward_step(args, tokens, model):
    positions = torch.arange(args.sequence, device=tokens.device).expand_as(tokens)
    loss = model(tokens, positions, None, labels=tokens.roll(-1, dims=1))

    def reduce(values):
        mean = values.float().mean()
        return mean, {"loss": mean.detach()}

    return loss, reduce


def is_ours(kind: type) -> bool:
    return any(base.__module__.startswith("transformer_engine") for base in kind.__mro__)


def train(args, device):
    """The losses of the steps, of one rank's tokens."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    model, optimizer = build(args, device)
    ours = sorted({type(m).__name__ for m in model.modules() if is_ours(type(m))})
    print(f"modules of transformer_engine: {', '.join(ours)}")
    torch.manual_seed(0)
    period = torch.randint(args.vocab, (1, 16), device=device)
    tokens = period.repeat(args.batch, args.sequence // 16)
    losses = []
    for step in range(args.steps):
        model.zero_grad_buffer()
        optimizer.zero_grad()
        reduced = get_forward_backward_func()(
            forward_step_func=lambda data, model: forward_step(args, next(data), model),
            data_iterator=iter([tokens] * args.microbatches), model=[model], num_microbatches=args.microbatches,
            seq_length=args.sequence, micro_batch_size=args.batch, forward_only=False,
        )  # fmt: skip
        applied, norm, _ = optimizer.step()
        losses.append(torch.stack([r["loss"] for r in reduced]).mean().item())
        if step in (0, args.steps - 1):
            print(f"step {step + 1}: loss {losses[-1]:.4f}, gradient norm {float(norm):.3f}, applied {applied}")
    return losses


def options(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--sequence", type=int, default=128)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=2)
    parser.add_argument("--tp", type=int, default=1, help="ranks that share a layer")
    parser.add_argument("--experts", type=int, default=0, help="a mixture of so many experts in place of each MLP")
    parser.add_argument("--ep", type=int, default=1, help="ranks that share the experts")
    parser.add_argument("--fp8", choices=("delayed", "tensorwise", "blockwise"))
    parser.add_argument("--distributed-optimizer", action="store_true", help="megatron-core's: states over the ranks")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    args = options(arguments)
    need("megatron.core", "megatron")
    if not torch.cuda.is_available():
        print("megatron-core uses CUDA throughout: this example needs a GPU")
        return 2
    rank = int(os.environ.get("LOCAL_RANK", 0))
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl")
    losses = train(args, torch.device("cuda", rank))
    torch.distributed.destroy_process_group()
    return 0 if losses[-1] < losses[0] else 1


if __name__ == "__main__":
    sys.exit(main())
