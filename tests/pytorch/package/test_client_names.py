# Names that clients import without a guard: each import, and what a client does next with it (client_names.py), tried
# once.
import importlib
import subprocess
import sys

import pytest
import torch
from support import refused

from transformer_engine.pytorch.attention.dot_product_attention.context_parallel import pad_thd_sequences_for_cp

from .client_names import NEXT


@pytest.mark.parametrize(("module", "name"), NEXT, ids=str)
def test_a_client_imports_it_and_goes_on(module, name):
    scope = {}
    exec(f"from {module} import {name} as found", scope)
    NEXT[module, name](scope["found"])
    assert getattr(importlib.import_module(module), name) is scope["found"]


def test_each_import_comes_first_in_a_process():
    """No path needs another import before it."""
    modules = sorted({module for module, _ in NEXT})
    lines = [f"from {module} import {name} as found" for module, name in {m: (m, n) for m, n in NEXT}.values()]
    code = "import os, sys\nfor line in sys.stdin.read().splitlines():\n"
    code += "    if os.fork() == 0:\n        exec(line)\n        os._exit(0)\n"
    code += "    assert os.wait()[1] == 0, line"
    done = subprocess.run(
        [sys.executable, "-c", code], input="\n".join(lines), capture_output=True, text=True, timeout=600, cwd="/"
    )
    assert len(lines) == len(modules) and done.returncode == 0, done.stderr


def test_packed_sequences_that_do_not_fit():
    tokens, cumulative = torch.arange(5), torch.tensor([0, 3, 5])
    op = "pad_thd_sequences_for_cp"
    for changes, words in (
        ({"cu_seqlens": torch.tensor([0, 3, 6])}, ("'cu_seqlens'", "[0, 3, 6]", "at 5")),
        ({"cu_seqlens": torch.tensor([1, 3, 5])}, ("'cu_seqlens'", "[1, 3, 5]", "from 0 on")),
        ({"cu_seqlens": torch.tensor([0, 6, 5])}, ("'cu_seqlens'", "[0, 6, 5]")),
        ({"cu_seqlens": torch.tensor([[0, 5]])}, ("'cu_seqlens'", "[[0, 5]]")),
        ({"labels": torch.arange(4)}, ("'labels'", "4 entries", "wanted 5")),
        ({"labels": torch.arange(10).view(2, 5)}, ("'labels'", "(2, 5)")),
        ({"divisibility_factor": 0}, ("'divisibility_factor'", "0")),
    ):
        options = {"input_ids": tokens, "labels": tokens, "cu_seqlens": cumulative, "divisibility_factor": 4}
        with refused(ValueError, op, *words):
            pad_thd_sequences_for_cp(**options | changes)


def test_packed_sequences_of_every_length():
    """Each of them at its new place, padded at its end alone; none is lost, and what divides stays as it is."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(40):
        lengths = torch.randint(0, 9, (int(torch.randint(0, 6, (), generator=generator)),), generator=generator)
        ends = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        tokens = torch.arange(1, int(ends[-1]) + 1)
        ids, labels, padded = pad_thd_sequences_for_cp(tokens, -tokens, ends, 3, 0, 0)
        want = [torch.nn.functional.pad(part, (0, -len(part) % 3)) for part in tokens.split(lengths.tolist())]
        assert ids.tolist() == [int(t) for part in want for t in part] and labels.tolist() == (-ids).tolist()
        assert padded.diff().tolist() == [len(part) for part in want] and padded[0] == 0
