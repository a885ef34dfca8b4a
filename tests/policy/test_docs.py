# The documents are right: their snippets run, the files that they name exist, the README is short and has the numbers
# of the rows.
import collections
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
DOCUMENTS = [REPO / "README.md", REPO / "CONTRIBUTING.md", *(REPO / "docs").glob("**/*.md")]
READMES = [*(REPO / "transformer_engine").rglob("README.md"), REPO / "build_backend/README.md"]  # a folder's own
BLOCK = re.compile(r"^(?:<!-- (not run|runs in): (.*?) -->\n)?```(\w*)\n(.*?)^```$", re.M | re.S)
README_CHARACTERS = 9000


def name(path):
    return str(path.relative_to(REPO))


def blocks(path, language):
    """[(marker or None, text of the marker, code)]"""
    return [(m[1], m[2], m[4]) for m in BLOCK.finditer(path.read_text()) if m[3] == language]


def documents_with(language):
    return [path for path in DOCUMENTS if any(not marker for marker, _, _ in blocks(path, language))]


def environment():
    """The interpreter of the tests first on PATH; one thread."""
    return os.environ | {"PATH": os.pathsep.join((str(Path(sys.executable).parent), *os.get_exec_path()))}


def test_the_readme_is_short():
    assert len((REPO / "README.md").read_text()) <= README_CHARACTERS


@pytest.mark.parametrize("path", documents_with("python"), ids=name)
def test_its_python_runs(path, tmp_path):
    """The blocks of a document in their order, as a reader types them, in one process."""
    code = "\n".join(text for marker, _, text in blocks(path, "python") if not marker)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300, env=environment())
    assert done.returncode == 0, done.stderr
    if path.name == "README.md":  # the text has the two numbers that its GLU prints
        kept = re.search(r"^It prints (\d+) and (\d+):", path.read_text(), re.M).groups()
        assert tuple(done.stdout.split()[-2:]) == kept


@pytest.mark.parametrize("path", documents_with("bash"), ids=name)
def test_its_commands_run(path):
    for marker, _, text in blocks(path, "bash"):
        if not marker:
            command = ["bash", "-euo", "pipefail", "-c", text]
            done = subprocess.run(command, capture_output=True, text=True, cwd=REPO, timeout=300, env=environment())
            assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("path", DOCUMENTS, ids=name)
def test_markers_of_blocks_name_their_tests(path):
    """'runs in': each command's script is named in one of those tests."""
    for language in ("python", "bash"):
        for marker, words, text in blocks(path, language):
            if marker != "runs in":
                continue
            tests = "".join((REPO / file).read_text() for file in words.split())
            called = re.findall(r"(?:examples/(\w+)\.py|-m transformer_engine\.(\w+))", text)
            assert called and all((script or module) in tests for script, module in called), (name(path), words)


def test_few_blocks_are_not_run_and_each_has_a_language():
    """At most two of a page, each with its reason, and an eighth of all."""
    skipped, bare, run = [], [], 0
    for path in DOCUMENTS:
        bare += [name(path) for m in BLOCK.finditer(path.read_text()) if m[3] not in ("python", "bash", "text")]
        for language in ("python", "bash"):
            found = blocks(path, language)
            skipped += [(name(path), words) for marker, words, _ in found if marker == "not run"]
            run += sum(marker != "not run" for marker, _, _ in found)
        assert len(re.findall(r"^```", path.read_text(), re.M)) == 2 * len(BLOCK.findall(path.read_text())), name(path)
    assert not bare
    assert all(len(words.split()) > 2 for _, words in skipped), skipped
    assert max(collections.Counter(file for file, _ in skipped).values(), default=0) <= 2, skipped
    assert 8 * len(skipped) <= run


def test_the_readmes_commands_exist():
    commands = blocks(REPO / "README.md", "bash")[0][2]
    scripts = re.findall(r"^bash (\S+)", commands, re.M)
    assert scripts and all((REPO / script).is_file() for script in scripts)


def test_the_readmes_numbers_are_the_rows():
    command = [sys.executable, str(REPO / "benchmarks/charts.py"), "--numbers"]
    clean = {key: value for key, value in os.environ.items() if key != "PYTHONSAFEPATH"}
    made = subprocess.run(command, capture_output=True, text=True, check=True, env=clean).stdout
    found = re.search(r"<!-- numbers: begin -->\n(.*)<!-- numbers: end -->", (REPO / "README.md").read_text(), re.S)
    assert found[1] == made, "python benchmarks/charts.py --numbers"


def test_every_extra_is_one_that_examples_name():
    extras = re.findall(r"^(\w+) = \[", re.search(r"optional-dependencies\](.*?)^\[", PYPROJECT, re.M | re.S)[1], re.M)
    page = (REPO / "docs/guide/examples.md").read_text()
    assert "[fa4]" in (REPO / "docs/guide/flash_implementations.md").read_text()
    assert set(extras) - {"test", "fa4"} == set(re.findall(r"\[(\w+)\](?![(\w])", page))


PYPROJECT = (REPO / "pyproject.toml").read_text()


@pytest.mark.parametrize("path", DOCUMENTS + READMES, ids=name)
def test_files_that_documents_point_at_exist(path):
    text = path.read_text()
    links = {(path.parent / target) for target in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", text)}
    named = re.findall(r"`([\w./-]+\.(?:py|sh|h|cuh|cpp|md|txt|toml)|\.ci/run)`", text)
    roots = [REPO, REPO / "transformer_engine/common", REPO / "transformer_engine/pytorch", path.parent]
    roots += [REPO / "transformer_engine/common/core", REPO / "transformer_engine/common/ops/quantize"]
    roots += [REPO / "transformer_engine/pytorch/csrc", REPO / "transformer_engine"]
    missing = [str(link) for link in links if not link.exists()]
    missing += [n for n in named if not any((root / n).exists() for root in roots)]
    assert not missing, f"{name(path)} points at {missing}"


def test_every_page_is_reached_from_the_index():
    pages = set((REPO / "docs").glob("**/*.md")) - {REPO / "docs/README.md"}
    linked = {
        (index.parent / target).resolve()
        for index in (REPO / "docs/README.md", REPO / "docs/reference/api/README.md")
        for target in re.findall(r"\]\(([^)#:]+)\)", index.read_text())
    }
    assert pages <= linked


def test_every_readme_of_a_folder_is_short_and_reached_from_the_architecture():
    page = REPO / "docs/develop/architecture.md"
    linked = {(page.parent / target).resolve() for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text())}
    assert set(READMES) <= linked and len(READMES) > 10
    assert not {name(path): n for path in READMES if (n := len(path.read_text().splitlines())) > 60}


def test_every_preset_that_contributing_names_exists():
    presets = json.loads((REPO / "CMakePresets.json").read_text())
    named = set(re.findall(r"--preset (\w+)", (REPO / "CONTRIBUTING.md").read_text()))
    for kind in ("configurePresets", "buildPresets", "testPresets"):
        assert {preset["name"] for preset in presets[kind]} == named
