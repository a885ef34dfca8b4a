"""Peaks of memory: from CUDA's allocator, or on the CPU from torch's, through its profiler."""

from __future__ import annotations

from collections.abc import Callable

import torch


def peak_bytes(work: Callable[[], object], device: torch.device) -> int:
    """The peak of tensors' bytes while work() ran, above the bytes before."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - before
    cpu = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=cpu, profile_memory=True, acc_events=True) as profile:
        work()
    now = most = 0
    for event in sorted(_allocations(profile), key=lambda event: event.start_time_ns):
        now += event.extra_fields.alloc_size
        most = max(most, now)
    return most


def _allocations(profile: torch.profiler.profile):
    left = list(profile.profiler.kineto_results.experimental_event_tree())
    while left:
        event = left.pop()
        left += event.children
        if event.tag == torch._C._profiler._EventType.Allocation:
            yield event
