# The documents say what is so: their Python runs, and what the documents point at exists. Mutant: renaming a
# module argument in the README's example, or a file that CONTRIBUTING names, turns these red.
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("*.md")]


def blocks(path, language):
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.M | re.S)


@pytest.mark.parametrize(
    "path", ["README.md", "docs/graphs.md", "docs/offload.md", "docs/stash.md", "docs/tensor_parallel.md"]
)
def test_its_example_runs(path):
    (example,) = blocks(REPO / path, "python")
    done = subprocess.run([sys.executable, "-c", example], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr


def test_the_readmes_commands_exist():
    (commands,) = blocks(REPO / "README.md", "bash")
    scripts = re.findall(r"^bash (\S+)", commands, re.M)
    assert scripts == ["examples/quickstart.sh", "qa/test.sh"]
    assert all((REPO / script).is_file() for script in scripts)


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda p: p.name)
def test_files_that_documents_point_at_exist(path):
    text = path.read_text()
    links = {(path.parent / target) for target in re.findall(r"\]\(([^)#:]+)\)", text)}
    named = re.findall(r"`([\w./-]+\.(?:py|sh|h|cuh|cpp|md|txt|toml)|\.ci/run)`", text)
    roots = [REPO, REPO / "transformer_engine/common", REPO / "transformer_engine/pytorch", path.parent]
    roots += [REPO / "transformer_engine/common/core", REPO / "transformer_engine/common/ops/quantize"]
    roots += [REPO / "transformer_engine/pytorch/csrc", REPO / "transformer_engine"]
    missing = [str(link) for link in links if not link.exists()]
    missing += [n for n in named if not any((root / n).exists() for root in roots)]
    assert not missing, f"{path.name} points at {missing}"


def test_every_preset_that_contributing_names_exists():
    presets = json.loads((REPO / "CMakePresets.json").read_text())
    named = set(re.findall(r"--preset (\w+)", (REPO / "CONTRIBUTING.md").read_text()))
    for kind in ("configurePresets", "buildPresets", "testPresets"):
        assert {preset["name"] for preset in presets[kind]} == named
