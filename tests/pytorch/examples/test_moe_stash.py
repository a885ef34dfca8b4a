"""examples/moe_stash.py on tiny layers: its checks pass, and a failed check is reported."""

import csv

import pytest
import torch

import moe_stash
from moe.blocks import Config, MoEStack
from moe.run import Result, batch

TINY = ["--layers", "3", "--tokens", "128", "--hidden", "32", "--ffn", "32", "--steps", "1", "--page-bytes", "2048"]


def show(tmp_path, device, *options):
    return moe_stash.main([*TINY, "--device", device, "--out", str(tmp_path), *options])


def test_it_shows_what_it_promises(tmp_path, device, capsys):
    assert show(tmp_path, device) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said
    assert "zipf" in said and "hot" in said
    assert "eager: losses and gradients of 3 of 3 steps are those without" in said
    assert "there was no room for it" in said and "run again: it is good" in said
    assert "are alive" in said and "have left" in said
    assert "</svg>" in (tmp_path / "occupancy.svg").read_text()
    assert (tmp_path / "occupancy.png").read_bytes().startswith(b"\x89PNG")
    with open(tmp_path / "occupancy.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["operation"] for row in rows] == ["store"] * 2 + ["load"] * 2  # the last layer's backward is next
    assert int(rows[-1]["pages in flight"]) == 0


def test_a_difference_is_reported_and_makes_it_fail(tmp_path, device, capsys, monkeypatch):
    monkeypatch.setattr(Result, "equals", lambda self, other: False)
    assert show(tmp_path, device) == 1
    assert "WRONG: eager: losses and gradients of 0 of 3 steps" in capsys.readouterr().out


def test_shapes_that_follow_the_counts_give_the_same_bits(device):
    """The same stack with buffers, and with the host waiting for the counts, where all fit."""
    sizes = {"layers": 2, "tokens": 64, "hidden": 32, "ffn": 32, "experts": 8, "here": 3, "k": 2}
    results = []
    for capacity in (2.5, None):
        config = Config(**sizes, capacity=capacity)
        torch.manual_seed(0)
        model = MoEStack(config, torch.device(device))
        model.skew("zipf")
        x, target = batch(config, torch.device(device), 0)
        loss = torch.nn.functional.mse_loss(model(x).float(), target.float())
        loss.backward()
        results.append(Result(loss.detach(), [p.grad for p in model.parameters()]))
        assert all(bool(p.grad.any()) for name, p in model.named_parameters() if "experts" not in name)
    assert results[0].equals(results[1])


def test_the_hot_expert_is_chosen_by_all_tokens(device):
    config = Config(layers=2, tokens=64, hidden=32, ffn=32, experts=8, here=3, k=2, capacity=4.0)
    model = MoEStack(config, torch.device(device))
    for name, hot in (("balanced", False), ("hot", True)):
        model.skew(name)
        model(batch(config, torch.device(device), 0)[0])
        first, second = (block.moe.tokens_per_expert for block in model.blocks)
        assert (int(first[0]) == config.tokens) == hot and (int(second[-1]) == config.tokens) == hot


def test_bad_options_are_refused(capsys):
    with pytest.raises(SystemExit):
        moe_stash.main(["--layers", "1"])
    assert "--layers from 2 on" in capsys.readouterr().err
