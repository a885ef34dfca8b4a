"""The configuration of a run: sizes, schedule, seed, and the two presets. No default depends on the machine."""

from dataclasses import asdict, dataclass

import torch

VOCAB = 256  # one token per byte value: no tokenizer to download, any file is a valid input
FP8 = ("delayed", "current", "block")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class ExampleError(Exception):
    """Bad input or a failed save: the message names the file or argument, the value found, and the fix."""


@dataclass(frozen=True)
class Config:
    """A Llama-like model and its training. Every field in identity() changes the bits of a run."""

    hidden: int
    ffn_hidden: int
    layers: int
    heads: int
    kv_groups: int
    seq: int
    batch: int
    steps: int
    lr: float
    warmup: int
    save_every: int
    dtype: str = "fp32"
    seed: int = 0
    eps: float = 1e-5
    optimizer: str = "fused"  # Transformer Engine's AdamW, or torch's
    fp8: str | None = None  # the recipe of the layers' products
    experts: int = 0  # in the place of each MLP; 0: none
    topk: int = 0  # how many of them a token has
    graphed: bool = False  # mixtures replay CUDA graphs: changes no bit
    stashed: bool = False  # what the experts keep leaves for host pages: changes no bit
    accumulate: int = 1  # microbatches of a step, whose gradients are added up
    tied: bool = False  # head and embedding share one weight
    offload_layers: int = 0  # layers whose saved tensors leave for the CPU: changes no bit
    tp: int = 1  # ranks that share the model: changes only the order of sums
    sequence_parallel: bool = False  # these ranks also share the tokens
    recompute_allgather: bool = True  # gathered inputs are not kept for the backward: changes no bit
    data_parallel: bool = False  # replicas of the model share a step's windows: changes only the order of sums
    sharded: bool = False  # each of them keeps a part of the optimizer's states
    overlap: bool = False  # their collectives run beside the products: changes no bit
    reproducible: bool = False  # sums over replicas are in their order
    deterministic: bool = False  # attention's backward repeats its bits on CUDA (a CPU always does)

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads

    @property
    def tokens(self) -> int:
        """Tokens per step."""
        return self.batch * self.seq

    @property
    def expert_hidden(self) -> int:
        """Hidden units of an expert: a token's experts have as many as the MLP of the dense model."""
        return self.ffn_hidden // self.topk

    @property
    def twin_is_fused(self) -> bool:
        """The twin is of the library's modules too: without FP8, or without experts."""
        return bool(self.fp8 or self.experts)

    @property
    def parameters(self) -> int:
        return self.parameters_with(self.experts)

    def parameters_with(self, experts: int) -> int:
        """With that many experts in a layer; with topk, the parameters that a token uses."""
        attention = 2 * self.hidden * (self.hidden + self.kv_groups * self.head_dim)
        mlp = 3 * self.hidden * self.ffn_hidden
        if self.experts:
            mlp = 3 * self.hidden * self.expert_hidden * experts + self.hidden * self.experts
        layer = attention + mlp + 2 * self.hidden
        return self.layers * layer + (1 if self.tied else 2) * VOCAB * self.hidden + self.hidden

    def identity(self) -> dict:
        """The fields a resumed run must share with the checkpoint it continues."""
        free = {"steps", "save_every", "offload_layers", "tp", "sequence_parallel", "recompute_allgather"}
        free |= {"data_parallel", "sharded", "overlap", "reproducible", "graphed", "stashed"}
        return {key: value for key, value in asdict(self).items() if key not in free}


PRESETS = {
    # 3M parameters: both models, trained one beside the other, take about 2 minutes on 2 CPU cores.
    "toy": Config(
        hidden=256, ffn_hidden=704, layers=4, heads=8, kv_groups=4, seq=256, batch=8,
        steps=200, lr=1e-3, warmup=40, save_every=100, deterministic=True,
    ),
    # 1.0B parameters in bf16 with fp32 master weights: 14 GB of state per model, 14 GB on disk.
    "h200": Config(
        hidden=2048, ffn_hidden=8192, layers=16, heads=16, kv_groups=8, seq=4096, batch=4,
        steps=50, lr=1.5e-4, warmup=40, save_every=500, dtype="bf16",
    ),
}  # fmt: skip
