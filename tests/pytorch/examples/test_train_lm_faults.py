"""examples/train_lm.py where the checkpoint, the text or the disk is bad, and when it is interrupted: its errors, and
that nothing is lost."""

import hashlib
import math
import os
import resource
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import train_lm
from lm import checkpoint
from lm.config import PRESETS, ExampleError
from lm.model import FusedLM
from lm.train import Trainer

from .train_lm_cases import FILES, TEXT, TINY, metrics, train

pytestmark = pytest.mark.usefixtures("tiny_toy")
SCRIPT = Path(train_lm.__file__)


def digests(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def _truncated(path):
    path.write_bytes(path.read_bytes()[:-100])


def _header_only(path):
    path.write_bytes(path.read_bytes()[:7])


def _text_file(path):
    path.write_text("not a checkpoint, but long enough to look at\n" * 10)


def _foreign(path):
    save_file({"weight": torch.ones(3)}, path)


def _tensor_gone(path):
    with checkpoint.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    del tensors["model.head.weight"]
    save_file(tensors, path, metadata=metadata)


def _wrong_shape(path):
    with checkpoint.safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    save_file(load_file(path) | {"model.norm.weight": torch.ones(3)}, path, metadata=metadata)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_truncated, "truncated or no safetensors file"),
        (_header_only, "truncated or no safetensors file"),
        (_text_file, "truncated or no safetensors file"),
        (_foreign, "not a checkpoint of this script"),
        (_tensor_gone, "model.head.weight is missing"),
        (_wrong_shape, r"model.norm.weight has shape \[3\], wanted \[64\]"),
        (Path.unlink, "no file"),
    ],
)
def test_a_bad_checkpoint_is_named_and_nothing_changes(tmp_path, text, spoil, message):
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "2")
    folder = tmp_path / "runs" / "toy"
    spoil(folder / "checkpoint.safetensors")
    before = digests(folder)
    with pytest.raises(ExampleError, match=message) as error:
        train(tmp_path, text, "cpu", "--no-twin", "--resume")
    assert str(folder / "checkpoint.safetensors") in str(error.value)
    assert digests(folder) == before


def test_a_checkpoint_that_does_not_fit_leaves_the_model_as_it_was(tmp_path, text):
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "2")
    path = tmp_path / "runs" / "toy" / "checkpoint.safetensors"
    _wrong_shape(path)
    torch.manual_seed(0)
    tensors = Trainer(FusedLM(TINY, torch.device("cpu")), TINY, torch.device("cpu")).tensors()
    before = {name: tensor.clone() for name, tensor in tensors.items()}
    with pytest.raises(ExampleError, match="does not fit"):
        checkpoint.Checkpoint(path).restore(tensors)
    assert all(torch.equal(before[name], tensor) for name, tensor in tensors.items())


def test_a_checkpoint_of_another_run_is_named(tmp_path, text):
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "2")
    with pytest.raises(ExampleError, match=r"another run \(seed 0 there, 3 here"):
        train(tmp_path, text, "cpu", "--no-twin", "--resume", "--seed", "3")
    text.write_bytes(TEXT[::-1])
    with pytest.raises(ExampleError, match=r"another run \(text "):
        train(tmp_path, text, "cpu", "--no-twin", "--resume")


def test_bad_text_is_named(tmp_path, text):
    with pytest.raises(ExampleError, match=r"missing.txt: cannot be read \(No such file"):
        train(tmp_path, tmp_path / "missing.txt", "cpu")
    with pytest.raises(ExampleError, match=r"cannot be read \(Is a directory"):
        train(tmp_path, tmp_path, "cpu")
    text.write_bytes(b"")
    with pytest.raises(ExampleError, match=r"text.py: the file is empty"):
        train(tmp_path, text, "cpu")
    text.write_bytes(TEXT[:500])
    with pytest.raises(ExampleError, match=r"text.py: 500 bytes, .* need at least \d+: add files"):
        train(tmp_path, text, "cpu")
    assert not (tmp_path / "runs").exists()


@pytest.fixture
def small_files():
    """As a full disk: no file may grow beyond 20,000 bytes (a real failed write, with an errno, and no root needed)."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    held = []

    def limit():
        held.append(signal.signal(signal.SIGXFSZ, signal.SIG_IGN))
        resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))

    def lift():
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    yield limit, lift
    lift()
    for handler in held:
        signal.signal(signal.SIGXFSZ, handler)


def test_a_full_disk_leaves_the_old_checkpoint_whole(tmp_path, text, small_files):
    train(tmp_path, text, "cpu", "--no-twin", "--steps", "2")
    folder = tmp_path / "runs" / "toy"
    path = folder / "checkpoint.safetensors"
    before = path.read_bytes()
    tensors = load_file(path)
    limit, lift = small_files
    limit()
    with pytest.raises(checkpoint.SaveError, match=r"saving failed .*before is whole.*Free \d+ MB .*--out") as error:
        checkpoint.save(path, tensors, {})
    with pytest.raises(checkpoint.SaveError, match="no checkpoint was written"):
        checkpoint.save(folder / "fresh.safetensors", tensors, {})
    lift()
    assert str(path) in str(error.value)
    assert path.read_bytes() == before
    assert {p.name for p in folder.iterdir()} == FILES
    assert train(tmp_path, text, "cpu", "--no-twin", "--steps", "4", "--resume") == 0


def test_a_failed_save_does_not_stop_the_training(tmp_path, text, monkeypatch, capsys):
    monkeypatch.setitem(PRESETS, "toy", replace(TINY, save_every=5))
    saves = []

    def no_space(tensors, path, metadata):
        saves.append(path)
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", no_space)
    with pytest.raises(checkpoint.SaveError, match="No space left on device"):
        train(tmp_path, text, "cpu", "--no-twin")
    assert len(saves) == 4
    shown = capsys.readouterr().out
    assert shown.count("warning: ") == 4 and "held out:" in shown
    assert len(metrics(tmp_path / "runs" / "toy")) == TINY.steps


def test_ctrl_c_saves_and_leaves(tmp_path, text):
    """The real script and a real signal; then the run goes on from what it saved."""
    text.write_bytes(TEXT * 4)  # the real toy preset's windows are longer
    command = [sys.executable, str(SCRIPT), "--data", str(text), "--out", str(tmp_path), "--device", "cpu", "--no-twin"]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [*command, "--steps", "100000"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    )
    for line in process.stdout:
        if line.startswith("step    1/"):
            break
    process.send_signal(signal.SIGINT)
    shown, errors = process.communicate(timeout=120)
    assert process.returncode == 130, errors
    assert "Traceback" not in errors
    assert "Ctrl-C: finishing this step" in shown and "stopped after step" in shown
    done = checkpoint.Checkpoint(tmp_path / "toy" / "checkpoint.safetensors").state["step"]
    assert 1 <= done == len(metrics(tmp_path / "toy"))

    resumed = subprocess.run(
        [*command, "--steps", str(done + 1), "--resume"], capture_output=True, text=True, env=environment, timeout=300
    )
    assert resumed.returncode == 0, resumed.stderr
    assert f"resumed at step {done}" in resumed.stdout


def test_the_script_reports_bad_input_without_a_traceback(tmp_path):
    command = [sys.executable, str(SCRIPT), "--data", str(tmp_path / "missing.txt"), "--device", "cpu"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120)
    assert done.returncode == 1
    assert done.stderr.startswith("train_lm.py: error: --data") and "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())


def test_a_loss_that_is_not_finite_stops_the_run(tmp_path, text, monkeypatch):
    monkeypatch.setitem(PRESETS, "toy", replace(TINY, lr=math.inf))
    with pytest.raises(ExampleError, match="the loss is nan in step 2"):
        train(tmp_path, text, "cpu", "--no-twin")
    assert not (tmp_path / "runs" / "toy" / "checkpoint.safetensors").exists()
