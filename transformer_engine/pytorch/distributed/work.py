"""Results of collectives with async_op besides torch.distributed's own: call wait() before the result is read."""

from collections.abc import Callable, Sequence
from typing import Any


class Work:
    """Several collectives and the steps after them, which the first wait() runs."""

    def __init__(self, started: Sequence[Any] = (), finish: Callable[[], object] | None = None) -> None:
        self._started, self._finish = list(started), finish

    def wait(self, timeout: Any = None) -> bool:
        """timeout: for each of the collectives, in torch.distributed's form."""
        for work in self._started:
            work.wait() if timeout is None else work.wait(timeout)
        finish, self._started, self._finish = self._finish, [], None
        if finish is not None:
            finish()
        return True

    def is_completed(self) -> bool:
        """Whether wait() would not wait for another rank."""
        return all(work.is_completed() for work in self._started)
