# The host's work for a group: calls of Python in a step with a recorded order, counted and not timed, so that they are
# the same on every machine. C++ does the work of a further tensor (csrc/saved_hooks/saved_tensor_hooks.cpp,
# csrc/stash/stash_tensors.cpp), but for its observers. Mutants: a storage handler in Python, a scheduler that is an
# autograd.Function, a second question whether anything is recorded: each turns these red.
import sys

import pytest
import torch

from transformer_engine.pytorch import saved as door

from .cases import count, made, report

GROUPS, ROWS, WIDTH = 9, 16, 8
MOST = {True: (6, 3), False: (4, 3)}  # scheduled: (forward, backward); three more than CPython 3.12 counts


class Keeps(torch.autograd.Function):
    """Saves its arguments and computes nothing."""

    @staticmethod
    def forward(ctx, x, kept):
        ctx.save_for_backward(*kept)
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        assert len(ctx.saved_tensors) > 0
        return grad, None


def forward(x, kept, counter, stash, scheduled):
    for i, tensors in enumerate(kept):
        if stash is None:
            x = Keeps.apply(x, tensors)
            continue
        x = stash.pre_schedule(x) if scheduled else x
        with stash.group(i, counter):
            x = Keeps.apply(x, tensors)
        x = stash.post_schedule(x) if scheduled else x
    return x


def calls(run, *args):
    """Its result, and the number of Python functions that ran."""
    events = []
    sys.setprofile(lambda frame, event, _: events.append(frame.f_code.co_qualname) if event == "call" else None)
    try:
        result = run(*args)
    finally:
        sys.setprofile(None)
    return result, len(events)


def counted(tensors, scheduled, stash_options):
    """(forward, backward): calls that the stash adds to those of a step without, for a group."""
    x, counter = torch.ones(ROWS, WIDTH, requires_grad=True), count(7, "cpu")
    kept = [[torch.ones(ROWS, WIDTH) for _ in range(tensors)] for _ in range(GROUPS)]
    for t in (t for group in kept for t in group):
        door.mark_pageable(t, counter)
    for _ in range(2):  # imports of torch's first use are not counted
        y, plain_forward = calls(forward, x, kept, counter, None, scheduled)
        _, plain_backward = calls(y.backward, torch.ones_like(y))
    with made("cpu", **stash_options) as stash:
        for _ in range(3):  # only the last one counts: its order is known, and it has a pool
            stash.reset()
            y, ours = calls(forward, x, kept, counter, stash, scheduled)
            _, back = calls(y.backward, torch.ones_like(y))
        numbers = report(stash)
        assert numbers["groups"] == (GROUPS - 1 if scheduled else GROUPS) and numbers["flags"] == 0
        assert numbers["live_bytes"] == numbers["groups"] * tensors * 7 * WIDTH * 4
    return (ours - plain_forward) / GROUPS, (back - plain_backward) / GROUPS


@pytest.mark.parametrize("options", [{}, {"device_pages": None}], ids=["pool", "sized"])
@pytest.mark.parametrize("scheduled", [True, False])
def test_python_calls_of_a_group(scheduled, options):
    found = counted(4, scheduled, options)
    assert found[0] <= MOST[scheduled][0] and found[1] <= MOST[scheduled][1], found


def test_a_tensor_more_is_no_call_more():
    assert counted(1, True, {}) == counted(8, True, {})
