#!/usr/bin/env python3
"""Train a small Llama-like language model of Transformer Engine's fused modules on real text, beside the same model in
plain PyTorch. One command, with or without a GPU; it stops cleanly on Ctrl-C and continues with --resume.

    python examples/train_lm.py                       # the toy preset on this machine's device
    python examples/train_lm.py --preset h200         # 1.0B parameters in bf16 on one H200
    python examples/train_lm.py --resume --steps 400  # continue from runs/toy/checkpoint.safetensors
    python examples/train_lm.py --fp8 current         # FP8 products, beside the same model in bf16
    python examples/train_lm.py --moe 8,2             # 8 experts in each layer, 2 a token, beside the dense model
    python examples/train_lm.py --optimizer torch     # torch's AdamW instead of FusedAdam
    torchrun --nproc-per-node=2 examples/train_lm.py --tp 2 --sequence-parallel   # one model over two processes
    torchrun --nproc-per-node=2 examples/train_lm.py --data-parallel --sharded --overlap   # two replicas of it

With --tp N the model is divided over N processes: attention by its heads, the MLPs by their hidden units, embedding and
head by rows of the vocabulary, also if --tie-embeddings makes them one. Each process has the whole norms and the loss
of all tokens. It uses NCCL on CUDA and gloo on the CPU. A checkpoint holds whole tensors, so a run can --resume with
another N.

With --data-parallel the processes, or groups of N of them, are replicas, each of which trains on its part of a step's
windows. --sharded divides the optimizer's states over them, --overlap runs their collectives beside the products, and
with --reproducible N replicas give the bits of one with --accumulate N. The checkpoint is a folder, which
torch.distributed.checkpoint writes: a run can --resume with another number of replicas, and the same --tp.

With --moe E,k each MLP is a te.MoEMLP of E experts, k of which a token has. An expert has 1/k of the MLP's hidden
units, so a token has the work of the dense model, its twin; with --fp8 too the twin is the same mixture without it.
With --graph each mixture replays CUDA graphs of its forward and backward, with --stash what the experts keep for the
backward leaves for pages of pinned host memory (te.stash.PagedStash); no bit changes.

Writes runs/<name>/{metrics.csv,checkpoint.safetensors}, and loss, memory and the experts' load as .svg and .png.
"""

import argparse
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # set_determinism needs it, before CUDA starts
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `lm`, also under PYTHONSAFEPATH

try:
    import torch
    import torch.distributed as dist
    from tqdm import tqdm

    from lm import checkpoint, data, data_parallel, parallel, report
    from lm.config import DTYPES, FP8, PRESETS, VOCAB, Config, ExampleError
    from lm.model import FusedLM, dense_twin, plain_twin, unquantized_twin
    from lm.optimizer import OPTIMIZERS
    from lm.train import Trainer, set_determinism
except ModuleNotFoundError as error:
    sys.exit(
        f"train_lm.py: error: {error}: run `bash qa/setup.sh` and use .venv/bin/python, "
        "or pip install 'transformer_engine[examples]' where the package is installed"
    )

HELD_OUT_BATCHES = 8
SAMPLE_BYTES = 240
EXIT_INTERRUPTED = 128 + signal.SIGINT


class Interrupt:
    """Turns the first Ctrl-C into a request that the loop reads between two steps; a second one ends at once."""

    def __init__(self):
        self.requested = False

    def __enter__(self):
        self.before = signal.signal(signal.SIGINT, self._ask)
        return self

    def __exit__(self, *error):
        signal.signal(signal.SIGINT, self.before)

    def _ask(self, *_):
        self.requested = True
        signal.signal(signal.SIGINT, self.before)
        tqdm.write("Ctrl-C: finishing this step, then saving (again: leave at once)")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not positive")
    return value


def experts_and_topk(text: str) -> tuple[int, int]:
    experts, topk = map(positive, text.split(","))
    if topk > experts:
        raise argparse.ArgumentTypeError(f"{topk} of {experts} experts are too many for a token")
    return experts, topk


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", choices=PRESETS, default="toy", help="model and schedule (default: toy)")
    parser.add_argument("--steps", type=positive, help="steps in all, those before --resume included")
    parser.add_argument("--device", choices=("cpu", "cuda"), help="default: cuda where there is one")
    parser.add_argument("--dtype", choices=DTYPES, help="of weights and activations; bf16 keeps fp32 master weights")
    parser.add_argument("--fp8", choices=FP8, help="recipe of the layers' products; the twin is the model without it")
    parser.add_argument(
        "--moe", type=experts_and_topk, metavar="E,K", default=(0, 0), help="E experts in a layer, K of them a token"
    )
    parser.add_argument("--graph", action="store_true", help="with --moe: each mixture is a CUDA graph")
    parser.add_argument("--stash", action="store_true", help="with --moe: a paged stash holds what the experts keep")
    parser.add_argument(
        "--optimizer", choices=OPTIMIZERS, default="fused", help="FusedAdam, or torch's AdamW, which a plain twin has"
    )
    parser.add_argument("--accumulate", type=positive, default=1, metavar="K", help="cut a step into K microbatches")
    parser.add_argument("--tie-embeddings", action="store_true", help="one weight for embedding and head")
    parser.add_argument(
        "--tp", type=positive, default=1, metavar="N", help="divide the model over torchrun's N processes"
    )
    parser.add_argument(
        "--sequence-parallel", action="store_true", help="with --tp: divide the tokens between layers too"
    )
    parser.add_argument(
        "--no-recompute-allgather",
        action="store_true",
        help="with it: keep gathered inputs, gather once in place of twice",
    )
    parser.add_argument(
        "--data-parallel", action="store_true", help="torchrun's processes are replicas (with --tp: groups of them)"
    )
    parser.add_argument("--sharded", action="store_true", help="with it: divide the optimizer's states over replicas")
    parser.add_argument("--overlap", action="store_true", help="with it: communicate beside the products")
    parser.add_argument("--reproducible", action="store_true", help="with it: sum over replicas in their order")
    parser.add_argument("--offload-layers", type=int, default=0, metavar="K", help="move what K layers save to the CPU")
    parser.add_argument("--data", type=Path, nargs="+", metavar="FILE", help="text (default: Python's own sources)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="torch.compile both models")
    parser.add_argument("--deterministic", action="store_true", help="bit-equal resume on CUDA too (toy: always)")
    parser.add_argument("--no-twin", action="store_true", help="do not train the plain twin beside it")
    parser.add_argument("--name", help="of the run (default: the preset, and the recipe of --fp8)")
    parser.add_argument("--out", type=Path, default=Path("runs"), help="folder of runs (default: runs)")
    parser.add_argument("--resume", action="store_true", help="go on from the run's checkpoint")
    return parser.parse_args(argv)


def choose_device(args: argparse.Namespace, config: Config) -> torch.device:
    if args.device == "cuda" and not torch.cuda.is_available():
        raise ExampleError("--device cuda: torch sees no CUDA device here: use --device cpu, or a machine with a GPU")
    if args.device is None and args.preset == "h200" and not torch.cuda.is_available():
        raise ExampleError(
            f"--preset h200 has {config.parameters / 1e9:.1f}B parameters and is meant for a GPU, and torch sees none: "
            "use --preset toy, or say --device cpu if you have the patience"
        )
    if (args.device or "cuda") == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    if args.tp > 1 or args.data_parallel:
        torch.cuda.set_device(dist.get_node_local_rank(0) % torch.cuda.device_count())
    return torch.device("cuda")


def check_tensor_parallel(args: argparse.Namespace, preset: Config) -> None:
    if args.sequence_parallel and args.tp == 1:
        raise ExampleError(
            "--sequence-parallel: wanted --tp N beside it, N > 1: it divides tokens over those processes"
        )
    if args.no_recompute_allgather and not args.sequence_parallel:
        raise ExampleError(
            "--no-recompute-allgather: wanted --sequence-parallel beside it, without which none is gathered"
        )
    if args.tp == 1:
        return
    if args.compile or args.optimizer == "torch" or args.fp8 == "delayed":
        raise ExampleError(
            f"--tp {args.tp}: not with --compile, --optimizer torch or --fp8 delayed (its scales are local) "
            "in this example"
        )
    sizes = {"heads": preset.heads, "groups of heads": preset.kv_groups, "SwiGLU units": preset.ffn_hidden}
    if args.sequence_parallel:
        sizes["positions"] = preset.seq
    wrong = [f"{size} {what}" for what, size in (sizes | {"bytes in the vocabulary": VOCAB}).items() if size % args.tp]
    if wrong:
        raise ExampleError(f"--tp {args.tp}: does not divide the {args.preset} preset's {', '.join(wrong)}")


def check_data_parallel(args: argparse.Namespace) -> None:
    for option in ("sharded", "overlap", "reproducible"):
        if getattr(args, option) and not args.data_parallel:
            raise ExampleError(f"--{option}: wanted --data-parallel beside it, whose collectives it is an option of")
    if args.data_parallel and (args.compile or args.optimizer == "torch"):
        raise ExampleError("--data-parallel: not with --compile or --optimizer torch in this example")


def check_experts(args: argparse.Namespace, preset: Config) -> None:
    experts, topk = args.moe
    if not experts:
        for option in ("graph", "stash"):
            if getattr(args, option):
                raise ExampleError(f"--{option}: is for mixtures, and there are none: add --moe E,K")
        return
    if preset.ffn_hidden % topk:
        raise ExampleError(f"--moe {experts},{topk}: wanted a divisor of the preset's {preset.ffn_hidden} SwiGLU units")
    if args.tp > 1 or args.data_parallel or args.compile:
        raise ExampleError("--moe: not with --tp, --data-parallel or --compile in this example")
    if args.dtype == "fp32" and args.device != "cpu" and torch.cuda.is_available():
        raise ExampleError("--moe: the experts multiply in 16 bits on a GPU: leave --dtype at bf16")


def configure(args: argparse.Namespace) -> Config:
    preset = PRESETS[args.preset]
    if preset.batch % args.accumulate:
        raise ExampleError(
            f"--accumulate {args.accumulate}: wanted a divisor of the preset's {preset.batch} windows in a step"
        )
    check_tensor_parallel(args, preset)
    check_data_parallel(args)
    check_experts(args, preset)
    if args.fp8 == "delayed" and args.compile:
        raise ExampleError("--compile: torch.compile cannot follow --fp8 delayed: use --fp8 current or --fp8 block")
    if not 0 <= args.offload_layers < preset.layers or (args.offload_layers and args.compile):
        raise ExampleError(
            f"--offload-layers {args.offload_layers}: wanted 0 to {preset.layers - 1}, fewer than the model's "
            f"{preset.layers} layers, and no --compile beside it"
        )
    return replace(
        preset,
        steps=args.steps or preset.steps,
        dtype=args.dtype or ("bf16" if args.fp8 or args.moe[0] else preset.dtype),
        optimizer=args.optimizer,
        fp8=args.fp8,
        experts=args.moe[0],
        topk=args.moe[1],
        graphed=args.graph,
        stashed=args.stash,
        accumulate=args.accumulate,
        tied=args.tie_embeddings,
        offload_layers=args.offload_layers,
        tp=args.tp,
        sequence_parallel=args.sequence_parallel,
        recompute_allgather=not args.no_recompute_allgather,
        data_parallel=args.data_parallel,
        sharded=args.sharded,
        overlap=args.overlap,
        reproducible=args.reproducible,
        seed=args.seed,
        deterministic=preset.deterministic or args.deterministic,
    )


class Run:
    """One run in its folder: the fused model, its plain twin on request, the data, and their checkpoint."""

    def __init__(self, folder: Path, config: Config, device: torch.device, batches: data.Batches, ranks: parallel.Ranks,
                 *, twin: bool, compiled: bool, resume: bool):  # fmt: skip
        self.ranks = ranks
        file = "checkpoint" if config.data_parallel else "checkpoint.safetensors"
        self.path, self.config, self.batches = folder / file, config, batches
        self.identity = config.identity() | {"text": batches.fingerprint, "device": device.type}
        found = checkpoint.Checkpoint(self.path) if resume and not config.data_parallel else None
        if found:
            found.check(self.identity)
        set_determinism(config, device)
        torch.manual_seed(config.seed)
        fused = FusedLM(config, device, ranks)
        # The twin starts from the same first weights; after a resume it repeats the steps that the checkpoint holds.
        make_twin = unquantized_twin if config.fp8 else dense_twin if config.experts else plain_twin
        twins = config if config.twin_is_fused else replace(config, optimizer="torch")
        self.twin = Trainer(make_twin(fused, config, device), twins, device, compiled) if twin else None
        self.trainer = Trainer(fused, config, device, compiled)
        if found:
            tensors = self.trainer.tensors()
            found.restore(tensors, ranks, self.trainer.optimizer.parameters)
            self.trainer.restored(tensors, found.state["step"])
        elif resume:
            self.trainer.done = data_parallel.restore(self.path, fused, self.trainer.optimizer, self.identity, ranks)
        self.log = report.Log(folder, config, self.trainer.done) if ranks.is_first else report.Silent(config)
        self.failed: checkpoint.SaveError | None = None  # why the last save failed

    def train(self) -> bool:
        """Train to config.steps, saving on the way and at the end; False if Ctrl-C came first (saved, too)."""
        with Interrupt() as interrupt:
            if self.twin and self.trainer.done:
                for _ in tqdm(range(self.trainer.done), desc="the plain twin catches up", disable=None, leave=False):
                    if interrupt.requested:
                        return False
                    self.twin.step(self.batches)
            while self.trainer.done < self.config.steps and not self.ranks.any(interrupt.requested):
                ours = self.trainer.step(self.batches)
                plain = self.twin.step(self.batches) if self.twin else None
                self.log.step(self.trainer.done, ours, plain)
                if self.trainer.done % self.config.save_every == 0 and self.trainer.done < self.config.steps:
                    self._save()
            self.log.close()
            self._save()
            return not self.ranks.any(interrupt.requested)

    def _save(self) -> None:
        """Save; a failed write stops neither the training nor its report."""
        progress = {"step": self.trainer.done, "identity": self.identity}
        try:
            if self.config.data_parallel:
                model, optimizer = self.trainer.model, self.trainer.optimizer
                data_parallel.save(self.path, model, optimizer, progress, self.ranks)
            else:
                tensors = self.ranks.whole(self.trainer.tensors(), self.trainer.optimizer.parameters)
                if self.ranks.is_first:
                    checkpoint.save(self.path, tensors, progress)
            self.failed = None
        except checkpoint.SaveError as error:
            self.failed = error
            self.log.say(f"warning: {error}")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    config = configure(args)
    device = choose_device(args, config)
    with parallel.joined(config, device) as ranks:
        return go(args, config, device, ranks)


def go(args: argparse.Namespace, config: Config, device: torch.device, ranks: parallel.Ranks) -> int:
    moe, fp8 = f"-moe-{config.experts}-{config.topk}" if config.experts else "", f"-fp8-{args.fp8}" if args.fp8 else ""
    name = args.name or f"{args.preset}{moe}{fp8}"
    folder = args.out / name
    files = args.data or data.stdlib_files()
    text = data.read_text(files)
    source = ", ".join(map(str, args.data)) if args.data else "the Python standard library's sources"
    batches = data.Batches(text, config, source)
    text_line = f"{len(text):,} bytes of {source} ({len(files)} files)"
    print(report.header(name, config, device, text_line, ranks.replicas), flush=True)
    if not args.resume and any((folder / file).exists() for file in ("checkpoint", "checkpoint.safetensors")):
        print(f"{folder} holds an earlier run, which this one replaces (--resume goes on with it, --name keeps both)")
    twin = not args.no_twin and ranks.size == 1 and not config.data_parallel
    run = Run(folder, config, device, batches, ranks, twin=twin, compiled=args.compile, resume=args.resume)
    if args.resume:
        nothing = "" if run.trainer.done < config.steps else f"; --steps {config.steps} leaves nothing to train"
        print(f"resumed at step {run.trainer.done} from {run.path}{nothing}")

    if ranks.size > 1 and not config.data_parallel:
        print(f"memory: {run.trainer.model.memory_of_modes(batches[0][:, :-1].to(device))}", flush=True)
    if not run.train():
        run.log.plots()
        if run.failed:
            raise run.failed
        print(f"stopped after step {run.trainer.done}, saved in {run.path}: --resume goes on from there")
        return EXIT_INTERRUPTED

    held_out = batches.held_out(HELD_OUT_BATCHES)
    ours = run.trainer.bits_per_byte(held_out)
    print(f"held out: {ours:.4f} bits per byte ({sum(map(len, held_out))} windows of {config.seq} bytes)")
    if run.twin:
        print(report.comparison(run.log, (ours, run.twin.bits_per_byte(held_out))))
    print(report.costs(run.log))
    print(report.sample(run.trainer.sample(b"def ", SAMPLE_BYTES)))
    run.log.plots()
    if run.failed:
        raise run.failed
    plots = "loss, memory and load" if config.experts else "loss and memory"
    print(f"wrote {folder}/metrics.csv, {run.path.name}, {plots} as .svg and .png")
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main())
    except ExampleError as error:
        sys.exit(f"train_lm.py: error: {error}")
    except KeyboardInterrupt:
        print("train_lm.py: left at once; a checkpoint that was saved before is whole", file=sys.stderr)
        sys.exit(EXIT_INTERRUPTED)
