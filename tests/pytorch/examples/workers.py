# examples/train_lm.py divided over ranks, as its suites start it (ranks.py): from one checkpoint of the whole model.
import contextlib
import io
import shutil
from dataclasses import replace
from pathlib import Path

import torch.distributed as dist
from ranks import here

import train_lm
from lm import report
from lm.config import PRESETS

TINY = replace(
    PRESETS["toy"], hidden=64, ffn_hidden=96, layers=2, heads=4, kv_groups=4, seq=32, batch=4,
    lr=2e-3, warmup=5, save_every=1000,
)  # fmt: skip
TEXT = b"".join(b"def f%d(x, y):\n    return x * %d + y\n\n" % (i, i * i) for i in range(400))
OPTIONS = ("--accumulate", "2", "--tie-embeddings", "--no-twin", "--device", here().type)
SEQUENCE = ("--sequence-parallel",)
MODES = {"tokens": (), "sequence": SEQUENCE, "sequence_kept": (*SEQUENCE, "--no-recompute-allgather")}


def train(folder, name, *options):
    """[(loss, gradient's norm) of each step] as this process sees them, and what it prints."""
    seen, shown = [], io.StringIO()
    before = PRESETS["toy"], train_lm.SAMPLE_BYTES, report.Log.step, report.Silent.step
    PRESETS["toy"], train_lm.SAMPLE_BYTES = TINY, 5

    def noting(log):
        def step(self, number, ours, plain):
            seen.append((ours.loss, ours.norm))
            log(self, number, ours, plain)

        return step

    report.Log.step, report.Silent.step = (noting(log) for log in before[2:])
    given = ["--data", str(Path(folder) / "text.py"), "--out", str(folder), "--name", name, *OPTIONS, *options]
    try:
        with contextlib.redirect_stdout(shown):
            assert train_lm.main(given) == 0
    finally:
        PRESETS["toy"], train_lm.SAMPLE_BYTES, report.Log.step, report.Silent.step = before
    return seen, shown.getvalue()


def begin(folder):
    """The checkpoint of a whole model's first step that every run goes on from."""
    (Path(folder) / "text.py").write_bytes(TEXT)
    train(folder, "start", "--steps", "1")


def go_on(folder, name, steps, *options, of="start"):
    """train() from `of`, whose folder stays as it is."""
    if not dist.is_initialized() or dist.get_rank() == 0:
        shutil.copytree(Path(folder) / of, Path(folder) / name)
    if dist.is_initialized():
        dist.barrier()
    return train(folder, name, "--resume", "--steps", str(steps), *options)


DATA = "--data-parallel"
REPLICATED = {
    "plain": (DATA,),
    "overlap": (DATA, "--overlap"),
    "sharded": (DATA, "--sharded", "--overlap"),
    "reproducible": (DATA, "--overlap", "--reproducible", "--accumulate", "1"),
    "fp8": (DATA, "--sharded", "--overlap", "--fp8", "delayed"),
}


def replicated(rank, folder, steps, options):
    """{name: what this rank sees of so many steps from first weights}, by the options of each run."""
    return {name: train(folder, name, "--steps", str(steps), *given) for name, given in options.items()}


def divided(rank, folder, steps, modes, fp8=False):
    """Of each mode what this rank sees of the steps that it goes on for; fp8: also of three from first weights."""
    ranks = dist.get_world_size()
    seen = {m: go_on(folder, f"{m}{ranks}", steps, "--tp", str(ranks), *MODES[m]) for m in modes}
    if fp8:
        seen["fp8"] = train(folder, "fp8", "--steps", "3", "--tp", str(ranks), "--fp8", "current", *SEQUENCE)
    return seen
