"""Golden losses: 20 steps of the example's toy model, fp32 on a CPU, must repeat their bits run to run at a fixed
thread count, and stay within 1e-4 of the stored ones on any machine. A change of the mathematics shows here first.

    python tests/pytorch/examples/test_golden.py  # writes tests/goldens/toy_losses.json again; say why in the commit

The mutant that turns this file red: let swiglu gate with the second half (all 20 losses differ, the first by 6e-3).
"""

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[3]
GOLDEN = ROOT / "tests" / "goldens" / "toy_losses.json"
STEPS = 20
RTOL = 1e-4


def text() -> bytes:
    """40,000 bytes that are the same everywhere: words drawn by a 31-bit linear congruential generator."""
    words = [b"the", b"model", b"reads", b"bytes", b"and", b"learns", b"what", b"comes", b"next", b","]
    words, state = [*words, b"then", b"it", b"writes", b".", b""], 1
    drawn = []
    while sum(map(len, drawn)) + len(drawn) < 40_000:
        state = (1103515245 * state + 12345) % 2**31
        drawn.append(words[state // 65536 % len(words)])
    return b" ".join(drawn)


def losses() -> list[float]:
    """The toy preset's model on short windows, on one thread: LibTorch's products depend on the thread count."""
    from lm.config import PRESETS
    from lm.data import Batches
    from lm.model import FusedLM
    from lm.train import Trainer

    config = replace(PRESETS["toy"], seq=64, batch=4)
    threads, device = torch.get_num_threads(), torch.device("cpu")
    torch.set_num_threads(1)
    try:
        batches = Batches(text(), config)
        torch.manual_seed(config.seed)
        trainer = Trainer(FusedLM(config, device), config, device)
        return [trainer.step(batches).loss for _ in range(STEPS)]
    finally:
        torch.set_num_threads(threads)


def test_golden_losses():
    first, second = losses(), losses()
    assert first == second
    stored = json.loads(GOLDEN.read_text())["losses"]
    assert len(stored) == STEPS
    assert first == pytest.approx(stored, rel=RTOL, abs=0)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "examples"))
    GOLDEN.write_text(json.dumps({"torch": torch.__version__, "losses": losses()}, indent=1) + "\n")
    print(f"wrote {GOLDEN}")
