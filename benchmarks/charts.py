"""The README's two pictures and five numbers, from benchmarks/results/h200.csv: speed over plain PyTorch, and what an
MLP keeps for backward. Measures nothing; each figure is the newest row of its case, a sustained one if there is any.

python benchmarks/charts.py                  writes docs/images/{speed,memory}_h200, PNG and SVG
python benchmarks/charts.py --numbers        prints the five numbers as the README has them"""

import argparse
import pathlib

import rows as table

IMAGES = pathlib.Path(__file__).resolve().parents[1] / "docs/images"
EAGER, COMPILE, BF16 = "torch eager", "torch compile", "own bf16"
STEP = "forward+backward"
# label, case, op, shape, direction
SPEED = (
    ("SwiGLU\nforward", "1", "swiglu", "16384x14336", "forward"),
    ("SwiGLU\nbackward", "2", "swiglu", "16384x14336", "backward"),
    ("RMSNorm\nforward", "5", "rmsnorm", "16384x4096", "forward"),
    ("RMSNorm\nbackward", "7", "rmsnorm", "16384x4096", "backward"),
    ("LayerNormMLP\nstep", "14", "layernorm_mlp", "8192x4096x14336", STEP),
    ("Llama-3-8B\nlayer, step", "24", "transformer_layer", "8192x1x4096", STEP),
)
MLP = "8192x4096x14336"
# label, case, op, impl
MEMORY = (
    ("torch eager, bf16", "14", "layernorm_mlp", EAGER),
    ("torch.compile, bf16", "14", "layernorm_mlp", COMPILE),
    ("ours, bf16", "14", "layernorm_mlp", "ours"),
    ("ours, FP8 (current)", "14f", "layernorm_mlp_current", "ours"),
    ("ours, FP8 (current),\npre-activation in FP8", "14f", "layernorm_mlp_current_packed", "ours"),
)

# text, case, op, shape, direction, peer
NUMBERS = (
    ("SwiGLU backward, over torch.compile", "2", "swiglu", "16384x14336", "backward", COMPILE),
    ("LayerNormMLP step in bf16, over torch.compile", "14", "layernorm_mlp", MLP, STEP, COMPILE),
    ("the same in FP8 (delayed), over its own bf16", "14f", "layernorm_mlp_delayed", MLP, STEP, BF16),
    ("Llama-3-8B layer step in bf16, over torch.compile", "24", "transformer_layer", "8192x1x4096", STEP, COMPILE),
    ("AdamW step of 268M fp32 weights, over torch's fused", "26", "adamw", "268435456", "step", "torch fused"),
)


def newest(rows, case, op, shape, direction, impl="ours", peer=None):
    """The newest row of a case, sustained ones first, or None; with `peer`, of those that are compared with it."""
    wanted = {"case": case, "op": op, "shape": shape, "direction": direction, "impl": impl}
    wanted |= {} if peer is None else {"peer": peer}
    found = [row for row in rows if all(row[key] == value for key, value in wanted.items())]
    return max(found, key=lambda row: (row["timing"] == "sustained", row["date"]), default=None)


def speeds(rows):
    """[(label, over torch eager or None, over torch.compile or None)]"""
    found = []
    for label, *case in SPEED:
        pair = [newest(rows, *case, peer=peer) for peer in (EAGER, COMPILE)]
        found.append((label, *(float(row["ratio"]) if row else None for row in pair)))
    return found


def memory(rows):
    """[(label, MiB)]"""
    return [(label, float(newest(rows, case, op, MLP, "keeps", impl)["p50"])) for label, case, op, impl in MEMORY]


def numbers(rows):
    """The README's table."""
    lines = ["| on one NVIDIA H200 | speed |", "|---|---|"]
    for text, *case, peer in NUMBERS:
        lines.append(f"| {text} | {float(newest(rows, *case, peer=peer)['ratio']):.2f}x |")
    return "\n".join(lines)


def draw_speeds(figure, found):
    axes = figure.add_subplot(
        title="Speed over plain PyTorch, one NVIDIA H200, bf16",
        ylabel="PyTorch's time / ours (above 1: ours is faster)",
        xlabel="operation; step: forward and backward",
    )
    for which, (name, colour) in enumerate((("torch eager", "tab:orange"), ("torch.compile", "tab:blue"))):
        bars = [(i, entry[1 + which]) for i, entry in enumerate(found) if entry[1 + which] is not None]
        drawn = axes.bar([i + 0.4 * which - 0.2 for i, _ in bars], [v for _, v in bars], 0.38, color=colour)
        axes.bar_label(drawn, fmt="%.2f", fontsize=8)
        drawn.set_label(f"over {name}")
    axes.axhline(1, color="black", linewidth=0.8, label="equal")
    axes.set_xticks(range(len(found)), [label for label, *_ in found], fontsize=8)
    axes.legend()


def draw_memory(figure, found):
    axes = figure.add_subplot(
        title="Memory that an MLP keeps for backward\nRMSNorm, SwiGLU, 8192 tokens, 4096 / 14336, one NVIDIA H200",
        xlabel="MiB kept between forward and backward, weights and input not counted",
        ylabel="implementation",
    )
    colours = ["tab:orange" if label.startswith("torch") else "tab:blue" for label, _ in found]
    drawn = axes.barh([label for label, _ in found], [value for _, value in found], color=colours)
    axes.bar_label(drawn, fmt="%.0f", padding=3)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    for name, colour in (("plain PyTorch", "tab:orange"), ("ours", "tab:blue")):
        axes.barh([found[0][0]], [0], color=colour, label=name)
    axes.legend(loc="lower right")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=IMAGES, help="folder of the pictures")
    parser.add_argument("--numbers", action="store_true", help="print the README's table, draw nothing")
    args = parser.parse_args()
    found = table.load(table.RESULTS / "h200.csv")
    if args.numbers:
        print(numbers(found))
        return
    import matplotlib
    from matplotlib.figure import Figure

    matplotlib.rcParams["svg.hashsalt"] = "transformer_engine"  # the same picture is the same file
    matplotlib.rcParams["svg.fonttype"] = "none"
    args.out.mkdir(parents=True, exist_ok=True)
    for name, draw, data in (("speed", draw_speeds, speeds(found)), ("memory", draw_memory, memory(found))):
        figure = Figure(figsize=(9, 4), layout="constrained")
        draw(figure, data)
        figure.savefig(args.out / f"{name}_h200.png", dpi=110)
        figure.savefig(args.out / f"{name}_h200.svg", metadata={"Date": None})
        print(f"wrote {args.out / name}_h200.png and .svg")


if __name__ == "__main__":
    main()
