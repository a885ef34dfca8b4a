"""One safetensors file with everything that a run needs to continue bit for bit. Refuses to replace a whole file by
half of one, and to read a file that is truncated, foreign, or of another run; a refused file changes nothing."""

import json
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from .config import ExampleError
from .parallel import ALONE, Ranks, parameter_of

FORMAT = "transformer_engine/examples/train_lm/1"
UNSAID = {"accumulate": 1, "tied": False, "experts": 0, "topk": 0}  # defaults for checkpoints that lack these fields


class SaveError(ExampleError):
    """The checkpoint could not be written; the training itself is sound."""


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def save(path: Path, tensors: dict[str, torch.Tensor], state: dict) -> None:
    """Write beside `path`, flush to the disk, then rename: at every moment `path` is the old file or the new one."""
    beside = path.with_name(path.name + ".tmp")
    try:
        save_file(tensors, beside, metadata={"format": FORMAT, "state": json.dumps(state)})
        _sync(beside)
        os.replace(beside, path)
        _sync(path.parent)
    except BaseException as error:
        beside.unlink(missing_ok=True)
        if not isinstance(error, OSError | SafetensorError):
            raise
        size = sum(t.numel() * t.element_size() for t in tensors.values()) / 1e6
        kept = "the checkpoint that was there before is whole" if path.exists() else "no checkpoint was written"
        raise SaveError(
            f"{path}: saving failed ({error}); {kept}. Free {size:.0f} MB on that disk, or choose another with --out"
        ) from error


def check_identity(path: Path, saved: Mapping, identity: Mapping) -> None:
    saved = UNSAID | saved
    differs = [key for key in identity if saved.get(key) != identity[key]]
    if differs:
        what = ", ".join(f"{key} {saved.get(key)!r} there, {identity[key]!r} here" for key in differs)
        raise ExampleError(f"--resume: {path} is of another run ({what}): give the options it began with")


class Checkpoint:
    """An open checkpoint, its format checked; `restore` then checks every tensor before it writes the first."""

    def __init__(self, path: Path):
        self.path = path
        if not path.is_file():
            raise ExampleError(f"--resume: no file {path}: train without --resume first, or correct --out, --name")
        try:
            self.file = safe_open(path, framework="pt", device="cpu")
        except (OSError, SafetensorError) as error:
            raise ExampleError(
                f"--resume: {path} ({path.stat().st_size} bytes) is truncated or no safetensors file ({error}): "
                "put back a good copy, or train without --resume to start over"
            ) from error
        metadata = self.file.metadata() or {}
        if metadata.get("format") != FORMAT:
            raise ExampleError(
                f"--resume: {path} is a safetensors file, but not a checkpoint of this script (its metadata has "
                f"format {metadata.get('format')!r}, wanted {FORMAT!r}): correct --out or --name"
            )
        self.state = json.loads(metadata["state"])

    def check(self, identity: dict) -> None:
        """Refuse to continue with a model, text or seed other than that of the run."""
        check_identity(self.path, self.state["identity"], identity)

    def restore(
        self,
        tensors: dict[str, torch.Tensor],
        ranks: Ranks = ALONE,
        parameters: Mapping[str, torch.nn.Parameter] = MappingProxyType({}),
    ) -> None:
        """Fill `tensors` in place; a divided one gets this rank's part."""
        names = set(self.file.keys())
        problems = [f"{name} is missing" for name in tensors if name not in names]
        problems += [f"{name} is not of this model" for name in sorted(names - set(tensors))]
        for name in names.intersection(tensors):
            there = self.file.get_slice(name).get_shape()
            wanted = ranks.shape(parameter_of(name, parameters), tensors[name].shape)
            if there != wanted:
                problems.append(f"{name} has shape {there}, wanted {wanted}")
        if problems:
            raise ExampleError(f"--resume: {self.path} does not fit this model: {'; '.join(problems[:3])}")
        with torch.no_grad():
            for name, tensor in tensors.items():
                tensor.copy_(ranks.own(name, parameter_of(name, parameters), self.file.get_tensor(name)))
