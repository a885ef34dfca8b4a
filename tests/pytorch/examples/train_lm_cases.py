"""Helpers of the suites of examples/train_lm.py: a text, tiny runs and their files. No test is here."""

import csv
from dataclasses import replace

import train_lm
from lm.config import PRESETS

TINY = replace(
    PRESETS["toy"], hidden=64, ffn_hidden=96, layers=2, heads=4, kv_groups=2, seq=32, batch=4,
    steps=20, lr=2e-3, warmup=5,
)  # fmt: skip
FILES = {"metrics.csv", "checkpoint.safetensors", "loss.svg", "loss.png", "memory.svg", "memory.png"}
# Enough structure to learn in 20 steps, and no file of the machine's.
TEXT = b"".join(b"def f%d(x, y):\n    return x * %d + y\n\n" % (i, i * i) for i in range(400))


def train(tmp_path, text, device, *options):
    """Run the example in this process; its exit status."""
    return train_lm.main(["--data", str(text), "--out", str(tmp_path / "runs"), "--device", device, *options])


def metrics(folder):
    with open(folder / "metrics.csv", newline="") as file:
        return list(csv.DictReader(file))
