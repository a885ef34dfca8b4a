"""Bytes of real text, cut into training and held-out windows. Refuses text that is unreadable, empty or too short."""

import hashlib
import sysconfig
from pathlib import Path

import torch

from .config import Config, ExampleError

HELD_OUT = 16  # the last 1/16 of the text is never trained on
# Folders of the standard library that hold no sources of its own, or do not exist on every machine.
NOT_OURS = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}


def stdlib_files() -> list[Path]:
    """The Python standard library's own sources, in the same order on every machine that has the same Python."""
    root = Path(sysconfig.get_path("stdlib"))
    files = [path for path in root.rglob("*.py") if not NOT_OURS.intersection(path.relative_to(root).parts)]
    if not files:
        raise ExampleError(f"no *.py under {root}, this Python's standard library: pass text with --data FILE")
    return sorted(files, key=lambda path: path.relative_to(root).as_posix())


def read_text(files: list[Path]) -> bytes:
    """The bytes of the files, concatenated."""
    parts = []
    for path in files:
        try:
            parts.append(Path(path).read_bytes())
        except OSError as error:
            raise ExampleError(
                f"--data {path}: cannot be read ({error.strerror}): pass a readable text file"
            ) from error
        if not parts[-1] and len(files) == 1:
            raise ExampleError(f"--data {path}: the file is empty: pass a file with text in it")
    return b"".join(parts)


class Batches:
    """Windows of seq + 1 bytes, shuffled once per epoch. Batch i depends on (text, config.seed, i) and nothing else,
    so the position in the data is one integer: the step."""

    def __init__(self, text: bytes, config: Config, source: str = "the text"):
        held_out = len(text) // HELD_OUT
        needed = HELD_OUT * (config.seq + 2) + 2 * config.batch * config.seq
        if len(text) < needed:
            raise ExampleError(
                f"{source}: {len(text)} bytes, but batches of {config.batch} x {config.seq} bytes and a held-out "
                f"1/{HELD_OUT} need at least {needed}: add files with --data"
            )
        self.fingerprint = hashlib.sha256(text).hexdigest()
        self.config = config
        data = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        self.train_text, self.held_out_text = data[: len(data) - held_out], data[len(data) - held_out :]
        self.windows = (len(self.train_text) - 1) // config.seq
        self.per_epoch = self.windows // config.batch
        self.epoch, self.order = -1, None

    def __getitem__(self, index: int) -> torch.Tensor:
        """Batch index (any index >= 0) as int64 [batch, seq + 1]."""
        epoch, place = divmod(index, self.per_epoch)
        if epoch != self.epoch:
            shuffle = torch.Generator().manual_seed(self.config.seed * 1_000_003 + epoch)
            self.epoch, self.order = epoch, torch.randperm(self.windows, generator=shuffle).tolist()
        batch, seq = self.config.batch, self.config.seq
        chosen = self.order[place * batch : (place + 1) * batch]
        return torch.stack([self.train_text[w * seq : w * seq + seq + 1] for w in chosen]).long()

    def held_out(self, most: int) -> list[torch.Tensor]:
        """At most `most` batches of held-out windows, spread evenly over the held-out text."""
        seq, batch = self.config.seq, self.config.batch
        windows = (len(self.held_out_text) - 1) // seq
        count = min(windows, most * batch)
        starts = [windows * i // count * seq for i in range(count)]
        rows = torch.stack([self.held_out_text[s : s + seq + 1] for s in starts]).long()
        return list(rows.split(batch))
