# te.doctor(): it reports the installed parts, names missing ones where something is broken, and never raises.
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import transformer_engine.pytorch as te


def run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd="/", timeout=300)


def test_reports_versions_build_and_devices(capsys):
    assert te.doctor() is None
    out = capsys.readouterr().out
    for expected in ("2.20.0", torch.__version__, "CUDA kernels", "library cublasLt", "GPUs"):
        assert expected in out
    # Its report of the build agrees with the extension.
    assert ("compiled in (sm_90a)" in out) == te._C.built_with_cuda


def test_initialises_no_cuda():
    done = run("import transformer_engine.pytorch as te, torch; te.doctor(); assert not torch.cuda.is_initialized()")
    assert done.returncode == 0, done.stderr


def test_runs_as_a_module():
    done = subprocess.run(
        [sys.executable, "-m", "transformer_engine.doctor", "--devices"], capture_output=True, text=True, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    assert f"GPUs                {torch.cuda.device_count()}" in done.stdout
    assert done.stdout.count("\ncuda:") == torch.cuda.device_count()
    assert not done.stderr, "python -m must not warn"


def test_reports_an_extension_that_does_not_load():
    done = run(
        "import sys; sys.modules['transformer_engine.pytorch._C'] = None\n"
        "from transformer_engine.doctor import doctor; doctor()"
    )
    assert done.returncode == 0, done.stderr
    assert "does not load" in done.stdout
    assert "pip install ." in done.stdout


def test_reports_a_missing_torch():
    done = run("import sys; sys.modules['torch'] = None\nfrom transformer_engine.doctor import doctor; doctor()")
    assert done.returncode == 0, done.stderr
    assert "does not import" in done.stdout
    assert "pip install torch" in done.stdout


def test_reports_a_source_tree_that_hides_the_package():
    code = "import sys; sys.path.insert(0, sys.argv[1])\nfrom transformer_engine.doctor import doctor; doctor()"
    sources = Path(__file__).parents[3]
    if Path(te.__file__).is_relative_to(sources / "transformer_engine"):
        pytest.skip("an editable install is the source tree")
    done = subprocess.run([sys.executable, "-c", code, sources], capture_output=True, text=True, cwd="/", timeout=300)
    assert done.returncode == 0, done.stderr
    assert "this is the source tree" in done.stdout
