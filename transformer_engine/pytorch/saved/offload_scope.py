"""Whether this thread runs inside an enabled CPU offload context. cpu_offload sets it; modules and quantization, which
lie below cpu_offload, read it."""

import threading


class OffloadScope(threading.local):
    """depth: how many enabled offload contexts this thread is in."""

    depth = 0


offload_scope = OffloadScope()


def is_cpu_offload_enabled() -> bool:
    """Whether the calling code runs inside an enabled offload context."""
    return offload_scope.depth > 0
