"""examples/moe_capacity.py on a tiny layer: its checks pass, a failed check is reported, bad options are refused."""

import pytest
import torch

import moe_capacity
from transformer_engine.pytorch import verdict

TINY = ["--tokens", "256", "--hidden", "32", "--ffn", "32", "--experts", "8", "--k", "2", "--ranges", "4"]


def test_it_shows_what_it_promises(device, capsys):
    assert moe_capacity.main([*TINY, "--device", device]) == 0
    said = capsys.readouterr().out
    assert "WRONG" not in said
    for part in (
        "the ranges' outputs add up",
        "the ranges' gradients of the input add up",
        "16 of 16 gradients of weights have the bits of those of the whole layer",
        "with a capacity: the same bits",
        "is good.",
        "every token goes to experts 0 to 1: 512 rows",
        "256 rows were cut; MoEMLP(capacity_factor=4.0) holds the rows.",  # 1.5 times 128 even rows, in whole 128s
        "the gate is up",
        "with capacity_factor=4.0 nothing is cut, and the step is done",
    ):
        assert part in said, part


def test_a_step_that_is_not_skipped_is_reported(device, capsys, monkeypatch):
    monkeypatch.setattr(verdict.Watch, "gate", lambda self: torch.zeros((), device=device))
    assert moe_capacity.main([*TINY, "--device", device]) == 1
    assert "WRONG: the gate is up" in capsys.readouterr().out


@pytest.mark.parametrize(
    "options, words",
    [
        (["--ranges", "3"], "--ranges from 2 on that divide --experts"),
        (["--ranges", "1"], "--ranges from 2 on"),
        (["--k", "3"], "--k at most the experts of a range"),
        (["--capacity", "4"], "--capacity from 1 on, and below --ranges"),
        (["--capacity", "nan"], "--capacity from 1 on"),
    ],
)
def test_bad_options_are_refused(options, words, capsys):
    with pytest.raises(SystemExit):
        moe_capacity.main([*TINY, *options])
    assert words in capsys.readouterr().err
