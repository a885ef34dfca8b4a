"""examples/train_lm.py --moe on a tiny model: beside its dense twin, with FP8, the load of its experts, its resume."""

import pickle

import pytest
import torch
from safetensors.torch import load_file

import train_lm
from lm.config import ExampleError
from lm.model import FusedLM, dense_twin

from .train_lm_cases import FILES, TINY, metrics, train

pytestmark = pytest.mark.usefixtures("tiny_toy")

EXPERTS, TOPK = 4, 2
MOE = ("--moe", f"{EXPERTS},{TOPK}", "--deterministic")


def parts_of(name, saved):
    """The tensors of an entry of a checkpoint: a GroupedLinear's scales are a pickle, whose bytes name storages."""
    if not (name.startswith("scales.") and ".experts." in name):
        return [saved]
    return [t for t in pickle.loads(saved.numpy().tobytes()).values() if isinstance(t, torch.Tensor)]


def losses(rows, prefix=""):
    return [float(row[f"{prefix}loss"]) for row in rows]


def test_a_mixture_beside_its_dense_twin(tmp_path, text, device, capsys):
    assert train(tmp_path, text, device, *MOE) == 0
    folder = tmp_path / "runs" / "toy-moe-4-2"
    assert {p.name for p in folder.iterdir()} == FILES | {"load.svg", "load.png"}
    rows = metrics(folder)
    for prefix in ("", "plain_"):
        assert losses(rows, prefix)[-1] < losses(rows, prefix)[0] - 1.5
    for row in rows:
        shares = [float(row[f"expert{i}_share"]) for i in range(EXPERTS)]
        assert abs(sum(shares) - 1) < 1e-6 and max(shares) <= 1 / TOPK + 1e-6  # a token has an expert once
        assert float(row["aux_loss"]) > 0
    shown = capsys.readouterr().out
    for part in (
        "4 experts of SwiGLU 48, 0.1M of them a token's",
        "most loaded expert",
        "4 experts, 2 a token / the dense twin (same work for a token, seed and batches)",
        "the dense twin, fused AdamW: ",
        "loss, memory and load as .svg and .png",
    ):
        assert part in shown, part


def test_the_twin_shares_all_but_the_experts(device):
    config = train_lm.configure(train_lm.parse([*MOE]))
    torch.manual_seed(0)
    moe = FusedLM(config, torch.device(device))
    dense = dense_twin(moe, config, torch.device(device))
    assert config.dtype == "bf16" and config.expert_hidden == TINY.ffn_hidden // TOPK
    assert sum(p.numel() for p in moe.parameters()) == config.parameters
    assert sum(p.numel() for p in dense.parameters()) == TINY.parameters
    router = TINY.layers * TINY.hidden * EXPERTS
    assert config.parameters_with(TOPK) == TINY.parameters + router
    ours = dict(moe.named_parameters())
    same = [name for name, p in dense.named_parameters() if name in ours and torch.equal(p, ours[name])]
    assert len(same) == len(list(dense.parameters())) - 3 * TINY.layers  # an MLP has its norm and two weights


def test_the_large_preset_with_experts():
    """Of each token the parameters that the dense preset has, and the router's."""
    dense, moe = (train_lm.configure(train_lm.parse(["--preset", "h200", *more])) for more in ([], ["--moe", "8,2"]))
    with torch.device("meta"):
        model = FusedLM(moe, torch.device("meta"))
    assert sum(p.numel() for p in model.parameters()) == moe.parameters > 3 * dense.parameters
    router = moe.layers * moe.hidden * 8
    assert moe.parameters_with(2) == dense.parameters + router


@pytest.mark.parametrize("recipe", ["delayed", "current", "block"])
def test_fp8_beside_the_same_mixture_without_it(tmp_path, text, device, recipe, capsys):
    assert train(tmp_path, text, device, *MOE, "--fp8", recipe) == 0
    rows = metrics(tmp_path / "runs" / f"toy-moe-4-2-fp8-{recipe}")
    ours, plain = losses(rows), losses(rows, "plain_")
    assert 0 < abs(ours[0] - plain[0]) < 0.02 * plain[0]
    assert abs(sum(ours) / sum(plain) - 1) < 0.01
    assert f"FP8, {recipe} scaling / the same in bf16" in capsys.readouterr().out


@pytest.mark.parametrize("fp8", [(), ("--fp8", "delayed")], ids=["bf16", "delayed"])
def test_resume_is_bit_equal(tmp_path, text, device, fp8):
    options = (*MOE, *fp8, "--no-twin")
    train(tmp_path, text, device, *options, "--name", "straight", "--steps", "6")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "3")
    train(tmp_path, text, device, *options, "--name", "halves", "--steps", "6", "--resume")
    folder = tmp_path / "runs"
    straight, halves = (load_file(folder / name / "checkpoint.safetensors") for name in ("straight", "halves"))
    assert straight.keys() == halves.keys()
    for name in straight:
        assert all(map(torch.equal, parts_of(name, straight[name]), parts_of(name, halves[name]))), name
    one, other = (metrics(folder / name) for name in ("straight", "halves"))
    assert len(one) == len(other) == 6
    for key in ("loss", "aux_loss", "expert3_share"):
        assert [row[key] for row in one] == [row[key] for row in other]
    scales = [name for name in straight if name.startswith("scales.")]
    assert len(scales) == (4 * TINY.layers if fp8 else 0)  # qkv, proj, fc1 and fc2 of the experts
    with pytest.raises(ExampleError, match=r"another run .*experts 4 there, 2 here"):
        train(tmp_path, text, device, "--moe", "2,2", *fp8, "--no-twin", "--name", "halves", "--resume")


@pytest.mark.parametrize("more", [(), ("--fp8", "delayed"), ("--fp8", "block"), ("--accumulate", "2")], ids=str)
def test_captured_is_eager(tmp_path, text, device, more):
    """Bit for bit: losses, loads and the checkpoint, also of a run that a captured one continues."""
    options = (*MOE, *more, "--no-twin")
    train(tmp_path, text, device, *options, "--name", "eager", "--steps", "6")
    train(tmp_path, text, device, *options, "--name", "captured", "--steps", "3", "--graph")
    train(tmp_path, text, device, *options, "--name", "captured", "--steps", "6", "--graph", "--resume")
    folder = tmp_path / "runs"
    eager, captured = (load_file(folder / name / "checkpoint.safetensors") for name in ("eager", "captured"))
    for name in eager:
        assert all(map(torch.equal, parts_of(name, eager[name]), parts_of(name, captured[name]))), name
    one, other = (metrics(folder / name) for name in ("eager", "captured"))
    for key in ("loss", "aux_loss", "expert3_share"):
        assert [row[key] for row in one] == [row[key] for row in other]


@pytest.mark.parametrize("more", [(), ("--graph", "--accumulate", "2"), ("--fp8", "block")], ids=str)
def test_stashed_is_not(tmp_path, text, device, more):
    """Bit for bit; on a CPU the rows that left are no memory of the step."""
    options = (*MOE, *more, "--no-twin", "--steps", "4")
    train(tmp_path, text, device, *options, "--name", "kept")
    train(tmp_path, text, device, *options, "--name", "stashed", "--stash")
    folder = tmp_path / "runs"
    kept, stashed = (load_file(folder / name / "checkpoint.safetensors") for name in ("kept", "stashed"))
    for name in kept:
        assert torch.equal(kept[name], stashed[name]), name
    one, other = (metrics(folder / name) for name in ("kept", "stashed"))
    assert losses(one) == losses(other)
    if device == "cpu" and "--graph" not in more:
        assert float(other[-1]["memory_mib"]) < float(one[-1]["memory_mib"])


def test_microbatches_count_all_tokens(tmp_path, text, device):
    """And move the weights as one batch does, but for roundings."""
    for name, more in (("one", ()), ("two", ("--accumulate", "2"))):
        train(tmp_path, text, device, *MOE, *more, "--no-twin", "--name", name, "--steps", "2")
    one, two = (metrics(tmp_path / "runs" / name) for name in ("one", "two"))
    for i in range(EXPERTS):
        assert abs(float(one[0][f"expert{i}_share"]) - float(two[0][f"expert{i}_share"])) < 1e-6
    assert abs(losses(one)[0] - losses(two)[0]) < 1e-3


@pytest.mark.parametrize(
    "options, words",
    [
        (("--moe", "4,5"), None),
        (("--moe", "4"), None),
        (("--moe", "0,1"), None),
        (("--moe", "7,7"), "wanted a divisor of the preset's 96"),
        (("--graph",), "--graph: is for mixtures, and there are none"),
        (("--stash",), "--stash: is for mixtures, and there are none"),
        (("--moe", "4,2", "--compile"), "not with --tp, --data-parallel or --compile"),
        (("--moe", "4,2", "--data-parallel"), "not with --tp, --data-parallel or --compile"),
    ],
)
def test_bad_options_are_refused(tmp_path, text, device, options, words):
    with pytest.raises(SystemExit if words is None else ExampleError, match=words):
        train(tmp_path, text, device, *options)
