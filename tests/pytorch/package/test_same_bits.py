# same_bits.py finds what differs, and nothing else: the installed package beside a copy of it in which three modules
# were changed.
import collections
import itertools
import os
import pathlib
import shutil
import subprocess
import sys

from . import same_bits
from .same_bits_cases import DTYPES, MODULES, every_case, together

CHANGES = """

def _change():
    import torch

    joined, forward = Linear._joined, RMSNorm.forward
    Linear._joined = lambda self, names: joined(self, names).detach() if "bias" in names[0] else joined(self, names)
    RMSNorm.forward = lambda self, x: forward(self, x) * torch.ones((), device=x.device, dtype=x.dtype)

    def kept(self, x):
        self.register_buffer("seen", torch.ones(1))
        return x.relu()

    LayerNorm.forward = kept


_change()
"""


def copy_with(change, folder):
    """A package with the files of the installed one, but for a change that is appended to its __init__.py."""
    source = pathlib.Path(same_bits.installed()) / "transformer_engine"
    shutil.copytree(source, folder / "transformer_engine", copy_function=os.symlink)
    changed = folder / "transformer_engine/pytorch/__init__.py"
    text = changed.read_text()
    changed.unlink()
    changed.write_text(text + change)
    return folder


def test_a_changed_copy_is_found_and_what_it_left_alone_is_not(tmp_path):
    names = ("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear")
    command = [sys.executable, same_bits.__file__, "--base", same_bits.installed()]
    command += [
        "--head",
        str(copy_with(CHANGES, tmp_path)),
        "--only",
        *(f"^{name} | - | float32 | none | eager" for name in names),
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1, done.stderr
    found = collections.defaultdict(set)
    for line in done.stdout.splitlines():
        case, _, what = line.partition(": ")
        found[case.split(" ")[0]].add(what)
    assert found["Linear"] == {"gradient of 0.bias"}
    assert {what.split(":")[0] for what in found["RMSNorm"]} == {"saved bytes", "saved in order", "saved in any order"}
    assert "state 0.seen: only head has it" in found["LayerNorm"] and "output 0" in found["LayerNorm"]
    assert "LayerNormLinear" not in found


def test_differences_name_what_one_side_lacks():
    base = {"a": {"x": "1"}, "b": {"x": "1"}, "c": {"error type": "ValueError", "error text": "this"}}
    head = {"a": {"x": "2", "y": "1"}, "c": {"error type": "ValueError", "error text": "that"}, "d": {}}
    found = dict.fromkeys(same_bits.differences(base, head))
    assert list(found) == [
        ("a", "x"),
        ("a", "y: only head has it"),
        ("b", "only base ran it"),
        ("c", "error text: 'this' -> 'that'"),
        ("d", "only head ran it"),
    ]
    assert ("c", "error text: 'this' -> 'that'") not in same_bits.differences(base, head, messages=False)
    assert not same_bits.differences(base, base)


def test_the_cover_has_every_pair_of_values():
    rows = [
        dict(case.values) | {"dtype": case.dtype, "way": case.way} for case in every_case() if case.module == "Linear"
    ]
    axes = {axis: list(values) for axis, values in MODULES["Linear"].items()} | {"dtype": DTYPES}
    met = {pair for row in rows for pair in itertools.combinations(sorted((a, row.get(a, "")) for a in axes), 2)}
    for a, b in itertools.combinations(sorted(axes), 2):
        for v, w in itertools.product(axes[a], axes[b]):
            assert ((a, v), (b, w)) in met or not together({a: v, b: w}), (a, v, b, w)


def test_names_of_cases_are_their_own():
    names = [case.name for case in every_case()]
    assert len(names) == len(set(names)) and names == [case.name for case in every_case()]
