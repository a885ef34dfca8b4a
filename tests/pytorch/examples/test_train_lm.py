"""The main job: examples/train_lm.py on a tiny model. Its losses, its files, its resume; its faults are
test_train_lm_faults.py's."""

import math

import pytest
import torch
from safetensors.torch import load_file

import train_lm
from lm import data
from lm.config import ExampleError
from lm.model import FusedLM, plain_twin
from transformer_engine.pytorch.cpu_offload import layer as offload_layer

from .train_lm_cases import FILES, TINY, metrics, train

pytestmark = pytest.mark.usefixtures("tiny_toy")


def test_a_run_trains_reports_and_writes_its_files(tmp_path, text, device, capsys):
    assert train(tmp_path, text, device) == 0
    folder = tmp_path / "runs" / "toy"
    assert {p.name for p in folder.iterdir()} == FILES

    rows = metrics(folder)
    assert [int(row["step"]) for row in rows] == list(range(1, TINY.steps + 1))
    losses = [float(row["loss"]) for row in rows]
    assert abs(losses[0] - math.log(256)) < 0.2  # fresh weights know nothing: all 256 bytes are equally likely
    assert losses[-1] < losses[0] - 1.5
    # The twin differs by rounding alone: 20 steps of AdamW on fp32 keep two roundings of one model far closer.
    assert all(abs(float(row["plain_loss"]) - float(row["loss"])) < 5e-3 for row in rows)
    assert all(float(row["tokens_per_s"]) > 0 for row in rows)
    state = 3 * 4 * TINY.parameters  # fp32 weights and two moments
    assert all(float(row["memory_mib"]) * 2**20 > state for row in rows)
    for plot in ("loss", "memory"):
        assert "</svg>" in (folder / f"{plot}.svg").read_text()
        assert (folder / f"{plot}.png").read_bytes().startswith(b"\x89PNG")

    shown = capsys.readouterr().out
    for part in (
        "torch 2.",
        "step   20/20",
        "tokens/s",
        "MiB",
        "held out:",
        "bits per byte",
        "plain PyTorch",
        "sample:",
    ):
        assert part in shown, part


def test_the_twin_is_the_same_function(device):
    """Same weights, same logits in fp32. The bound: logits here are below 1, made by about 6 x layers products in a row
    whose fp32 roundings (2^-24, sums of at most 96 terms) grow at most linearly."""
    torch.manual_seed(0)
    fused = FusedLM(TINY, torch.device(device))
    plain = plain_twin(fused, TINY, torch.device(device))
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in fused.parameters()) == TINY.parameters
    tokens = torch.randint(256, (3, TINY.seq), device=device)
    ours, theirs = fused(tokens), plain(tokens)
    assert ours.abs().max() < 1
    assert (ours - theirs).abs().max() < 6 * TINY.layers * 96 * 2**-24
    assert not torch.equal(plain(tokens.roll(1, 1)), theirs)


def test_resume_is_bit_equal(tmp_path, text, device):
    folder = tmp_path / "runs"
    assert train(tmp_path, text, device, "--name", "straight", "--no-twin") == 0
    assert train(tmp_path, text, device, "--name", "halves", "--no-twin", "--steps", "10") == 0
    half = load_file(folder / "halves" / "checkpoint.safetensors")
    assert train(tmp_path, text, device, "--name", "halves", "--no-twin", "--resume") == 0

    straight = load_file(folder / "straight" / "checkpoint.safetensors")
    halves = load_file(folder / "halves" / "checkpoint.safetensors")
    assert straight.keys() == halves.keys()
    assert all(torch.equal(straight[name], halves[name]) for name in straight)
    assert not torch.equal(half["model.head.weight"], halves["model.head.weight"])
    losses = [[row["loss"] for row in metrics(folder / name)] for name in ("straight", "halves")]
    assert len(losses[0]) == TINY.steps
    assert [float(loss) for loss in losses[0]] == [float(loss) for loss in losses[1]]


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_both_optimizers_draw_one_curve(tmp_path, text, device, dtype, capsys):
    """AdamW on fp32 weights, ours and torch's, apart by rounding: of clipped gradients too, which are fp32 for torch's,
    so that bf16 keeps 20 steps within 1 %. No optimizer continues with the checkpoint of the other."""
    losses = []
    for optimizer in ("fused", "torch"):
        options = ("--optimizer", optimizer, "--dtype", dtype, "--deterministic")
        assert train(tmp_path, text, device, *options, "--name", optimizer) == 0
        rows = metrics(tmp_path / "runs" / optimizer)
        losses.append(torch.tensor([float(row["loss"]) for row in rows]))
        shown = capsys.readouterr().out
        assert f"{optimizer} AdamW on fp32 weights" in shown
        for line in (f"transformer_engine, {optimizer} AdamW: ", "plain PyTorch, torch AdamW: "):
            (found,) = [each for each in shown.splitlines() if each.startswith(line)]
            assert " ms a step, peak memory " in found
    assert (losses[0] / losses[1] - 1).abs().max() < (1e-4 if dtype == "fp32" else 1e-2)
    with pytest.raises(ExampleError, match=r"another run .*optimizer 'fused' there, 'torch' here"):
        train(tmp_path, text, device, *options, "--name", "fused", "--resume")


def test_resume_in_bf16_is_bit_equal_and_keeps_master_weights(tmp_path, text, device):
    options = ("--no-twin", "--dtype", "bf16", "--deterministic")
    train(tmp_path, text, device, *options, "--name", "straight", "--steps", "6")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "3")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "6", "--resume")
    straight = load_file(tmp_path / "runs" / "straight" / "checkpoint.safetensors")
    halves = load_file(tmp_path / "runs" / "halves" / "checkpoint.safetensors")
    assert all(torch.equal(straight[name], halves[name]) for name in straight)
    weight, master = straight["model.head.weight"], straight["optimizer.master.head.weight"]
    assert (weight.dtype, master.dtype) == (torch.bfloat16, torch.float32)
    assert torch.equal(weight, master.bfloat16()) and not torch.equal(weight.float(), master)


@pytest.mark.parametrize("fp8", [(), ("--fp8", "current")], ids=["plain", "fp8"])
def test_offloaded_layers_change_no_bit(tmp_path, text, device, fp8, monkeypatch):
    monkeypatch.setattr(offload_layer, "MIN_ELEMENTS", 64)
    options = ("--no-twin", "--steps", "3", "--deterministic", *fp8)
    for name, more in (("kept", ()), ("offloaded", ("--offload-layers", "1"))):
        assert train(tmp_path, text, device, *options, *more, "--name", name) == 0
    kept, offloaded = (load_file(tmp_path / "runs" / name / "checkpoint.safetensors") for name in ("kept", "offloaded"))
    assert all(torch.equal(kept[name], offloaded[name]) for name in kept)
    for wrong in (("--offload-layers", "4"), ("--offload-layers", "-1"), ("--offload-layers", "1", "--compile")):
        with pytest.raises(ExampleError, match="--offload-layers"):
            train(tmp_path, text, device, *wrong)


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_beside_the_same_model_without_it(tmp_path, text, device, recipe, capsys):
    """The first step's losses differ by FP8 alone; over the last 20 steps the means agree."""
    assert train(tmp_path, text, device, "--fp8", recipe, "--deterministic") == 0
    rows = metrics(tmp_path / "runs" / f"toy-fp8-{recipe}")
    ours, plain = ([float(row[f"{prefix}loss"]) for row in rows] for prefix in ("", "plain_"))
    assert len(rows) == TINY.steps and 0 < abs(ours[0] - plain[0]) < 0.02 * plain[0]
    assert abs(sum(ours) / sum(plain) - 1) < 0.01
    shown = capsys.readouterr().out
    assert f"FP8, {recipe} scaling / the same in bf16" in shown and "last 20" in shown


@pytest.mark.parametrize("recipe", ["delayed", "block"])
def test_resume_in_fp8_is_bit_equal(tmp_path, text, device, recipe):
    options = ("--no-twin", "--fp8", recipe, "--deterministic")
    train(tmp_path, text, device, *options, "--name", "straight", "--steps", "6")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "3")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "6", "--resume")
    straight, halves = (load_file(tmp_path / "runs" / n / "checkpoint.safetensors") for n in ("straight", "halves"))
    assert straight.keys() == halves.keys()
    assert all(torch.equal(straight[name], halves[name]) for name in straight)
    scales = [t for name, t in straight.items() if name.startswith("scales.")]
    assert len(scales) == (3 * TINY.layers if recipe == "delayed" else 0) and all(t.any() for t in scales)
    with pytest.raises(ExampleError, match=f"another run .*fp8 '{recipe}' there, 'current' here"):
        train(
            tmp_path, text, device, "--no-twin", "--name", "halves", "--resume", "--fp8", "current", "--deterministic"
        )


def test_delayed_scaling_is_not_compiled(tmp_path, text):
    with pytest.raises(ExampleError, match=r"--compile: .*--fp8 delayed: use --fp8 current or --fp8 block"):
        train(tmp_path, text, "cpu", "--fp8", "delayed", "--compile")


def test_resume_with_a_twin_brings_the_twin_to_the_same_step(tmp_path, text):
    train(tmp_path, text, "cpu", "--name", "straight", "--steps", "6")
    train(tmp_path, text, "cpu", "--name", "halves", "--steps", "3")
    train(tmp_path, text, "cpu", "--name", "halves", "--steps", "6", "--resume")
    straight, halves = (metrics(tmp_path / "runs" / name) for name in ("straight", "halves"))
    assert len(halves) == 6
    assert [float(row["plain_loss"]) for row in straight] == [float(row["plain_loss"]) for row in halves]


def test_rows_after_the_checkpoint_are_dropped_on_resume(tmp_path, text):
    """Killed between two saves: metrics.csv is ahead of the checkpoint."""
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "3")
    with open(tmp_path / "runs" / "toy" / "metrics.csv", "a") as file:
        file.write("4,9.9,1,1,,,\n")
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "5", "--resume")
    rows = metrics(tmp_path / "runs" / "toy")
    assert [float(row["step"]) for row in rows] == [1, 2, 3, 4, 5]
    assert float(rows[3]["loss"]) < 9


def test_a_missing_gpu_is_named(tmp_path, text, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ExampleError, match="--device cuda: torch sees no CUDA device"):
        train(tmp_path, text, "cuda")
    with pytest.raises(ExampleError, match=r"--preset h200 has 1.0B parameters"):
        train_lm.main(["--preset", "h200", "--data", str(text)])


def test_batches_depend_on_their_index_alone_and_never_show_held_out_text():
    text = bytes(range(256)) * 8
    batches, again = data.Batches(text, TINY), data.Batches(text, TINY)
    count = batches.per_epoch * 2 + 1
    forward = [batches[i] for i in range(count)]
    assert all(torch.equal(again[i], forward[i]) for i in reversed(range(count)))
    assert not torch.equal(forward[0], forward[batches.per_epoch])  # the second epoch has its own order
    seen = torch.cat(forward[: batches.per_epoch])[:, 0]
    assert len(seen) == batches.per_epoch * TINY.batch
    held_out = len(text) // data.HELD_OUT
    marked = bytes(len(text) - held_out) + b"\xff" * held_out
    batches = data.Batches(marked, TINY)
    assert all(batches[i].max() == 0 for i in range(batches.per_epoch))
    windows = torch.cat(batches.held_out(2))
    assert windows.min() == 255 and windows.shape == ((held_out - 1) // TINY.seq, TINY.seq + 1)


def test_the_default_text_is_the_standard_library_in_order():
    files = data.stdlib_files()
    assert files == data.stdlib_files() and len(files) > 100
    assert not any("site-packages" in path.parts or "dist-packages" in path.parts for path in files)
