"""A mailbox in pinned host memory: what a device has to say of a step, read without waiting for it."""

from __future__ import annotations

from collections.abc import Callable

import torch


class Mailbox:
    """One report, written over and over by the device. parse(memory): the report there, or None where nothing whole
    is there; of one that carries `step`, each is handed out once."""

    def __init__(self, device: torch.device, size: int, parse: Callable[[torch.Tensor], dict | None]) -> None:
        self.memory = torch.full((size,), 0xFF, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._parse, self._seen = parse, -1

    def peek(self) -> dict | None:
        """What has arrived, whether it was read before or not."""
        return self._parse(self.memory)

    def read(self) -> dict | None:
        """What has arrived since the last read."""
        report = self.peek()
        if report is None or report["step"] == self._seen:
            return None
        self._seen = report["step"]
        return report
