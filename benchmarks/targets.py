"""The targets as data: the bound of each case, its device and its peer. It holds no measurement.

A target names its row by case, op, dtype, shape and direction, and bounds one measure of it:
  GB/s, TFLOP/s   bytes_or_flops over p50, at least        us, MiB   p50, at most
  x PEER          `ratio` against that peer, at least
A bound given as "<= 1.15x torch's time" is stored as ratio >= 1 / 1.15. FP8 over `own bf16` must be at least the
gain of Transformer Engine 2.20.2 over its own bf16 (FP8_OVER_BF16), with cached weights too; without a target, or with
a lower one, a row below 1 is short all the same (report.py). A speed over another library is not measured in one
process, so it is no target: docs/reference/performance.md. Products and layers have no bound in us or TFLOP/s, which
change with a card's clocks. Shapes: rows x cols; M x N x K for a GEMM;
tokens x hidden x ffn_hidden for an MLP; tokens x heads x head size for RoPE (q and k heads together)."""

import dataclasses

AT_MOST = ("us", "MiB")
COMPILE, EAGER, GRAPH, OWN = "torch compile", "torch eager", "torch graph", "own bf16"

RECIPES = ("delayed", "current", "block")
FP8_OVER_BF16 = {
    "8192x28672x4096": (1.69, 1.63, 1.38),
    "8192x4096x14336": (1.68, 1.53, 1.35),
    "8192x6144x4096": (1.58, 1.46, 1.27),
    "8192x4096x4096": (1.14, 1.07, 1.21),
    "mlp": (1.66, 1.55, 1.31),
    "layer": (1.43, 1.38, 1.24),
}


@dataclasses.dataclass(frozen=True)
class Target:
    case: str
    op: str
    dtype: str
    shape: str
    direction: str
    measure: str
    bound: float
    device: str = "h200"

    def met(self, value):
        return value <= self.bound if self.measure in AT_MOST else value >= self.bound


def _targets(case, op, dtype, shape, direction, bounds, device="h200"):
    return [Target(case, op, dtype, shape, direction, measure, bound, device) for measure, bound in bounds.items()]


def _activation():
    shape = "16384x14336"
    yield from _targets("1", "swiglu", "bf16", shape, "forward", {"GB/s": 4100, f"x {COMPILE}": 0.98})
    yield from _targets("2", "swiglu", "bf16", shape, "backward", {"us": 705, f"x {COMPILE}": 1.25})
    yield from _targets("3", "swiglu_block", "fp8", shape, "forward", {"us": 365, f"x {COMPILE}": 1.5})


def _normalization():
    for shape, rate in (("16384x4096", 3850), ("32768x8192", 4100), ("8192x16384", 4000)):
        yield from _targets("5", "rmsnorm", "bf16", shape, "forward", {"GB/s": rate, f"x {COMPILE}": 0.98})
    yield from _targets("6", "add_rmsnorm", "bf16", "16384x8192", "forward", {"GB/s": 4050})
    for op in ("rmsnorm", "add_rmsnorm"):
        for shape in ("16384x4096", "32768x8192", "8192x16384"):
            yield from _targets("7", op, "bf16", shape, "backward", {"GB/s": 3700, f"x {COMPILE}": 1.25})
    yield from _targets("8", "add_rmsnorm_block", "fp8", "16384x7168", "forward", {"us": 265, f"x {COMPILE}": 1.4})


def _quantize():
    for op in ("quantize_block_row", "quantize_block", "cast_transpose"):
        yield from _targets("9", op, "fp8", "16384x7168", "forward", {"GB/s": 3850})


def _linear():
    step = "forward+backward"
    for shape in ("8192x28672x4096", "8192x4096x14336", "8192x6144x4096", "8192x4096x4096"):
        yield from _targets("11", "linear", "bf16", shape, step, {f"x {EAGER}": 0.99})
        yield from _targets("11", "linear_tuned", "bf16", shape, step, {f"x {OWN}": 0.99})  # no loss beyond noise
    for shape in ("8192x28672x4096", "8192x4096x14336", "8192x6144x4096", "8192x4096x4096"):
        for recipe, bound in zip(RECIPES, FP8_OVER_BF16[shape], strict=True):
            for cached in ("", "_cached"):
                yield from _targets("12", f"linear_{recipe}{cached}", "fp8", shape, step, {f"x {OWN}": bound})
    yield from _targets("12", "linear_delayed", "fp8", "8192x28672x4096", step, {f"x {EAGER}": 1 / 0.60})


def _mlp():
    shape, step = "8192x4096x14336", "forward+backward"
    yield from _targets("14", "layernorm_mlp", "bf16", shape, step, {f"x {COMPILE}": 1.00})
    yield from _targets("14", "layernorm_mlp", "bf16", shape, "keeps", {"MiB": 513})
    yield from _targets("14", "layernorm_mlp_tuned", "bf16", shape, step, {f"x {OWN}": 0.99})
    for recipe, bound in zip(RECIPES, FP8_OVER_BF16["mlp"], strict=True):
        op = f"layernorm_mlp_{recipe}"
        for cached in ("", "_cached"):
            yield from _targets("14f", f"{op}{cached}", "fp8", shape, step, {f"x {OWN}": bound})
        yield from _targets("14f", op, "fp8", shape, "keeps", {"MiB": 490})
    yield from _targets("14f", "layernorm_mlp_block_packed", "fp8", shape, "keeps", {"MiB": 270})


def _moe():
    shape, step = "8192x8x7168", "forward+backward"
    for op, direction, rate in (
        ("permute", "forward", 3200),
        ("unpermute", "forward", 4100),
        ("permute", "backward", 4000),
    ):
        yield from _targets("17", op, "bf16", shape, direction, {"GB/s": rate})
    yield from _targets("27", "router", "fp32", "8192x128x8", "forward", {"us": 25})
    few_wide, many_narrow = "8192x4096x14336x8x2", "8192x2048x768x128x8"
    for experts, eager, compiled in ((many_narrow, 1.10, 1.0), (few_wide, 1.03, 0.99)):
        for direction in ("forward", step):
            bounds = {f"x {EAGER}": eager, f"x {COMPILE}": compiled}
            yield from _targets("27", "moe_mlp", "bf16", experts, direction, bounds)
        yield from _targets("27", "moe_mlp_zipf", "bf16", experts, step, {"x own even": 1 / 1.12})
    yield from _targets("27", "moe_mlp_block", "fp8", few_wide, step, {f"x {OWN}": 1.15})
    yield from _targets("27", "moe_mlp_block", "fp8", many_narrow, step, {f"x {OWN}": 0.90})
    yield from _targets("27", "moe_mlp_block_cached", "fp8", many_narrow, step, {f"x {OWN}": 1.05})
    for experts, bound in (("64x128x128x8x2", 350), ("64x128x128x128x8", 450)):
        yield from _targets("27", "moe_mlp_host", "bf16", experts, step, {"us": bound})
    yield from _grouped(step)


def _grouped(step):
    """Of `main_grad` and `accumulate`: the peer writes bfloat16 and adds nothing."""
    large, many = "8x16384x28672x4096", "128x65536x1536x2048"
    for op, of_large, of_many in (
        ("grouped_linear", 0.98, 1.0),
        ("grouped_linear_device", 0.98, 1.0),
        ("grouped_linear_device_main_grad", 0.96, 0.88),
    ):
        for experts, bound in ((large, of_large), (many, of_many)):
            yield from _targets("18", op, "bf16", experts, step, {f"x {EAGER}": bound})
    for op, experts, bound in (
        ("delayed", large, 1.5),
        ("block", large, 1.2),
        ("device_block", large, 1.18),
        ("delayed", many, 0.93),  # lists of small groups, as sizes on the device
        ("current", many, 0.83),
        ("delayed_cached", many, 1.05),
        ("current_cached", many, 1.05),
        ("device_block_cached", large, 1.15),
        ("device_block_cached", many, 1.15),
    ):
        yield from _targets("18", f"grouped_linear_{op}", "fp8", experts, step, {f"x {OWN}": bound})
    for op, direction, bounds in (
        ("fprop_even", "forward", {f"x {EAGER}": 0.97}),
        ("dgrad_even", "backward", {f"x {EAGER}": 0.97}),
        ("fprop_zipf", "forward", {f"x {EAGER}": 1.08}),
        ("dgrad_zipf", "backward", {f"x {EAGER}": 1.08}),
    ):
        for experts in (large, many):
            yield from _targets("18", f"grouped_{op}", "bf16", experts, direction, bounds)
    for op, experts, bound in (
        ("wgrad_even", large, 0.96),
        ("wgrad_accumulate_even", large, 0.93),
        ("wgrad_accumulate_even", many, 0.72),
    ):
        yield from _targets("18", f"grouped_{op}", "bf16", experts, "backward", {f"x {EAGER}": bound})
    for op, direction, experts, bound in (
        ("fprop_block_even", "forward", large, 1.43),
        ("fprop_block_even", "forward", many, 1.43),
        ("fprop_block_zipf", "forward", many, 1.43),
        ("dgrad_block_even", "backward", large, 1.47),
        ("dgrad_block_even", "backward", many, 1.41),
        ("dgrad_block_zipf", "backward", many, 1.38),
        ("wgrad_block_even", "backward", large, 1.21),
        ("wgrad_block_even", "backward", many, 1.37),
    ):
        yield from _targets("18", f"grouped_{op}", "fp8", experts, direction, {f"x {OWN}": bound})
    for op, bound in (("", 2304), ("_device", 600), ("_device_main_grad", 350)):  # 6 us an expert and product
        yield from _targets("18", f"grouped_linear{op}_host", "bf16", "128x1024x128x128", step, {"us": bound})


def _layer():
    yield from _targets("20", "rope", "bf16", "16384x40x128", "forward", {"GB/s": 3850})
    shape, step = "8192x1x4096", "forward+backward"
    yield from _targets("24", "transformer_layer", "bf16", shape, step, {f"x {COMPILE}": 1.02})
    yield from _targets("24", "transformer_layer_tuned", "bf16", shape, step, {f"x {OWN}": 0.99})
    yield from _targets("24", "transformer_layer", "bf16", shape, "keeps", {"MiB": 802})
    yield from _targets("24", "transformer_layer_recompute_norm", "bf16", shape, step, {f"x {OWN}": 1 / 1.005})
    yield from _targets("24", "transformer_layer_recompute_norm", "bf16", shape, "keeps", {"MiB": 674})
    for recipe, bound in zip(RECIPES, FP8_OVER_BF16["layer"], strict=True):
        for cached in ("", "_cached"):
            yield from _targets("24", f"transformer_layer_{recipe}{cached}", "fp8", shape, step, {f"x {OWN}": bound})
    bounds = {"x torch varlen": 1 / 1.02, "x torch padded": 1 / 0.6}
    yield from _targets("31", "packed_attention", "bf16", "16384x40x128", step, bounds)
    yield from _targets("31", "packed_attention_sink", "bf16", "8192x72x64", step, {"x own vanilla": 1 / 1.2})
    yield from _targets("31", "attention_sink", "bf16", "8192x72x64", step, {"x own vanilla": 1 / 1.2})
    yield from _targets("31", "attention", "bf16", "8192x16x192x128", step, {"x torch cudnn": 1 / 1.01})
    yield from _targets("31", "chunked_attention_peak", "bf16", "8192x40x128", "keeps", {"MiB": 256})
    yield from _targets("31", "transformer_layer_half_padding", "bf16", "2x4096x4096", step, {"x own causal": 1 / 1.03})
    yield from _targets("25", "cross_entropy", "bf16", "4096x128256", step, {"us": 620})
    head = "8192x4096x128256"
    for op in ("linear_cross_entropy", "linear_cross_entropy_own_dtype"):
        yield from _targets("25", op, "bf16", head, step, {"x own separate": 1 / 1.05})
    yield from _targets("25", "linear_cross_entropy_peak_own_dtype", "bf16", head, "keeps", {"MiB": 600})


def _optimizer():
    shape, many = "268435456", "268435456x10000"
    yield from _targets("26", "adamw", "fp32", shape, "step", {"GB/s": 3800, "x torch fused": 1.09})
    yield from _targets("26", "adamw_master", "bf16", shape, "step", {"GB/s": 3800})
    yield from _targets("26", "adamw_remainder", "bf16", shape, "step", {"GB/s": 3700})
    yield from _targets("26", "adamw_bf16_moments", "fp32", shape, "step", {"GB/s": 3600})
    yield from _targets("26", "adamw_capturable", "fp32", shape, "step", {"x own by numbers": 0.97})
    yield from _targets("26", "l2norm", "fp32", shape, "step", {"GB/s": 3200})
    yield from _targets("26", "adamw_many", "fp32", many, "step", {"x own one tensor": 0.95})
    yield from _targets("26", "adamw_many_host", "fp32", "10000x512", "step", {"us": 1})  # a tensor
    yield from _targets("26", "adamw", "fp32", "20000000", "step", {"x torch fused": 0.9}, "cpu")
    yield from _targets("26", "adamw_many", "fp32", "10000x512", "step", {"x torch fused": 3}, "cpu")


def _host():
    step, mlp = "forward+backward", "16x256x512"
    yield from _targets("H", "linear", "bf16", "16x256x256", "forward", {f"x {EAGER}": 1 / 1.15})
    yield from _targets("H", "linear", "bf16", "16x256x256", step, {f"x {EAGER}": 1 / 1.1})
    yield from _targets("H", "layernorm_mlp", "bf16", mlp, step, {f"x {EAGER}": 1 / 0.7})
    # 80 us more than torch's node, which takes 400
    yield from _targets("H", "packed_attention", "bf16", "256x6x64", step, {"x torch varlen": 400 / 480})
    for recipe in RECIPES:
        yield from _targets("H", f"linear_{recipe}", "fp8", "16x256x256", step, {f"x {EAGER}": 1 / 2.2})
        yield from _targets("H", f"layernorm_mlp_{recipe}", "fp8", mlp, step, {f"x {EAGER}": 1 / 1.3})
    graphed = "graphed_layernorm_mlp"
    yield from _targets("23", graphed, "bf16", "128x1024x4096", step, {f"x {GRAPH}": 1 / 1.1})
    yield from _targets("23", f"{graphed}_current", "fp8", "128x1024x4096", step, {f"x {GRAPH}": 1 / 1.5})
    yield from _targets(
        "23", f"{graphed}_node", "bf16", "128x1024x4096", step, {"us": 1.5}
    )  # above its kernel, per node
    yield from _targets("23", "graphed_pipeline", "bf16", "4x8x1024x2048", "keeps", {"x own unshared": 1})
    yield from _targets("23", "graphed_tail", "bf16", "4096x4096", "forward", {"x own without event": 1})


def _memory_and_links():
    for op in ("stash", "reload"):
        large = {"x copy_ each": 0.85}
        yield from _targets("22", op, "bf16", "256MiB", "forward", large | {"x triton page copy": 1})
        yield from _targets("22", op, "bf16", "1024MiB", "forward", {"x copy_ each": 0.83})
        yield from _targets("22", op, "bf16", "32MiB", "forward", {"x copy_ each": 0.74, "x triton page copy": 1.7})
        yield from _targets("22", f"{op}_24", "bf16", "256MiB", "forward", {"GB/s": 2200})
        yield from _targets("22", f"{op}_host", "bf16", "256MiB", "forward", {"x pinned copy": 0.9})
        yield from _targets("22", f"{op}_call", "bf16", "64x1024", "forward", {"us": 25})  # of the host
    yield from _targets("22", "stash_group_each", "bf16", "64x1024", "forward+backward", {"us": 120})  # of the host
    yield from _targets("22", "stash_beside_lengthened", "bf16", "1024MiB", "forward", {"x own stash": 1 / 0.6})
    for way, kept in (("_graph", 0.36), ("_layers", 0.43)):
        yield from _targets(
            "29", f"moe_stash_step{way}", "bf16", "16x4", "forward+backward", {"x own static": 1 / 1.04}
        )
        yield from _targets("29", f"moe_stash_kept{way}", "bf16", "16x4", "keeps", {"x own static": 1 / kept})
    yield from _targets("29", "moe_stash_kept_graph_fp8", "bf16", "16x4", "keeps", {"x own static": 1 / 0.20})
    for shape in ("4x2", "16x1.5", "16x4", "16x8"):
        yield from _targets("22", "stash_peak", "bf16", shape, "keeps", {"x predicted": 0.95})
    yield from _targets("O", "offload_link", "bf16", "layer", "forward", {"x pinned copy": 0.95})
    yield from _targets("O", "offload_step", "bf16", "layer", "forward+backward", {f"x {OWN}": 1 / 1.03})
    yield from _targets("O", "offload_link_back", "bf16", "layer", "forward", {"x pinned copy": 0.95})
    for op in ("offload_step_peak", "offload_bound_peak"):
        yield from _targets("O", op, "bf16", "layer", "keeps", {"x predicted": 1 / 1.02})
    # A layer of 1.3 ms, 11 ms of copies and 13 of products: 1.8 where all of the copy is hidden.
    yield from _targets(
        "O", "offload_graphed", "bf16", "layer", "forward", {"x own without event": 1.5, f"x {OWN}": 1 / 1.03}
    )
    yield from _targets("O", "offload_graphed_peak", "bf16", "layer", "keeps", {"x predicted": 1 / 1.05})
    for op in ("offload_pack", "offload_unpack"):
        yield from _targets("O", op, "bf16", "layer", "forward", {"GB/s": 3800})
    for shape in ("8192x14336x4096", "8192x28672x8192"):
        yield from _targets("M", "parallel_pair", "bf16", shape, "forward+backward", {f"x {EAGER}": 1.0}, "h200x2")
        yield from _targets("M", "parallel_pair", "bf16", shape, "keeps", {f"x {EAGER}": 1.0}, "h200x2")
    yield from _targets("M", "parallel_peak", "bf16", "8192x14336x4096", "keeps", {f"x {EAGER}": 1.0}, "h200x2")
    yield from _targets(
        "M", "parallel_keeping", "bf16", "64x8192x4096x4096", "keeps", {"x predicted": 1 / 1.05}, "h200x2"
    )
    yield from _overlap()
    for op, shape, milliseconds in (
        ("gather_linear", "8192x57344x8192", 1.28),
        ("gather_linear", "8192x10240x8192", 0.41),
        ("gather_linear", "8192x28672x4096", 0.350),
        ("gather_linear", "16384x57344x8192", 2.62),
        ("gather_linear", "4096x57344x8192", 0.67),
        ("linear_scatter", "8192x8192x28672", 0.90),
    ):
        yield from _targets("M", op, "bf16", shape, "forward", {"us": 1000 * milliseconds}, "h200x8")


def _overlap():
    """Products beside their communication: time over that of the product alone (2 ranks), or over the best time of the
    run's own product and copies (rank 0 of 8)."""
    for op, shape, times in (
        ("gather_linear", "8192x57344x8192", 1.03),
        ("gather_linear", "8192x10240x8192", 1.05),
        ("gather_linear", "8192x28672x4096", 1.04),
        ("gather_linear", "8192x6144x4096", 1.10),
        ("linear_scatter", "8192x8192x28672", 1.05),
        ("linear_scatter", "8192x8192x8192", 1.12),
        ("linear_scatter", "8192x4096x14336", 1.09),
    ):
        yield from _targets("M", op, "bf16", shape, "forward", {"x gemm": 1 / times}, "h200x2")
    column = {"x gemm": 1 / 1.03, "x own keep": 1 / 1.01}
    yield from _targets("M", "gather_linear", "bf16", "8192x57344x8192", "backward", column, "h200x2")
    for op, shape, times in (
        ("gather_linear_of_8", "8192x57344x8192", 1.07),
        ("gather_linear_of_8", "16384x57344x8192", 1.07),
        ("gather_linear_of_8", "4096x57344x8192", 1.08),
        ("gather_linear_of_8", "8192x10240x8192", 1.20),
        ("gather_linear_of_8", "8192x28672x4096", 1.15),
        ("linear_scatter_of_8", "8192x8192x28672", 1.12),
    ):
        yield from _targets("M", op, "bf16", shape, "forward", {"x floor": 1 / times}, "h200x2")


def _data_parallel():
    """Two ranks: times over those of a peer, and waits of the stream that computes."""
    stack, host, two = "4x4096x14336x4096", "32x256x256x16", "h200x2"
    step = {"x own silent": 1 / 1.10, "x own serial": 1 / 0.88, "x fsdp2": 1.02}
    for connections in ("", "_connections1", "_connections8"):  # CUDA_DEVICE_MAX_CONNECTIONS
        for op, bounds in (("step", step), ("waits", {"x alone": 1 / 1.2}), ("waits_by_group", {"us": 50})):
            yield from _targets("D", f"data_parallel_{op}{connections}", "bf16", stack, "step", bounds, two)
    for op, dtype, bounds in (
        ("whole", "bf16", {"x torch ddp": 1.0}),
        ("average", "bf16", {"x megatron": 1.03}),
        ("block", "fp8", {f"x {OWN}": 1 / 0.85}),
        ("reduce", "bf16", {"x raw": 0.97}),
        ("reduce_reproducible", "bf16", {"x raw": 1 / 1.3}),
        ("gather", "bf16", {"x raw": 0.97}),
        ("memory_lean", "bf16", {"x fsdp2": 1.0}),
    ):
        yield from _targets("D", f"data_parallel_{op}", dtype, stack, "step", bounds, two)
    bounds = {"x fsdp2": 1 / 0.5, "x torch ddp": 1 / 1.15}
    yield from _targets("D", "data_parallel_host", "bf16", host, "step", bounds, two)
    yield from _targets("D", "data_parallel_growth", "bf16", host, "step", {"x own first": 1 / 1.001}, two)
    yield from _targets("D", "data_parallel_host_graphs", "bf16", host, "step", {"x own eager": 1 / 0.5}, two)
    for op, dtype, shape, bound in (
        ("gate", "fp32", "2000", 0.5),
        ("pre_hook", "fp32", "1000", 1.2),
        ("group", "fp32", "32x16x4096", 60 + 16),
        ("fp8_weight", "fp8", "16x256x256x256", 5),
        ("layout", "fp32", "10000", 200_000),
    ):
        yield from _targets("D", f"data_parallel_{op}", dtype, shape, "step", {"us": bound}, two)
    yield from _targets("D", "data_parallel_whole", "fp32", "4x256x704x256", "step", {"x torch ddp": 1 / 1.05}, "cpux2")


def _cpu():
    """One machine's cores against plain PyTorch on the same cores."""
    beside = {f"x {EAGER}": 1.0}
    for dtype in ("fp32", "bf16"):
        yield from _targets("1", "swiglu", dtype, "2048x2816", "forward", beside, "cpu")
        yield from _targets("2", "swiglu_no_emit", dtype, "2048x2816", "backward", beside, "cpu")
        for op in ("rmsnorm", "layernorm"):
            yield from _targets("5", op, dtype, "2048x1024", "forward", beside, "cpu")
            yield from _targets("7", op, dtype, "2048x1024", "backward", beside, "cpu")
    yield from _targets("14", "layernorm_mlp", "fp32", "512x512x1408", "forward+backward", {f"x {EAGER}": 0.9}, "cpu")


GROUPS = (
    _activation,
    _normalization,
    _quantize,
    _linear,
    _mlp,
    _moe,
    _layer,
    _optimizer,
    _host,
    _memory_and_links,
    _data_parallel,
    _cpu,
)
TARGETS = [target for group in GROUPS for target in group()]
