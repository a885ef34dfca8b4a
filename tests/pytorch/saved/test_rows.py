# Live rows of kept tensors: what was declared is found again at the tensor, at whatever lies over the same bytes with
# as many rows, and at nothing else, as long as the memory lives; shapes whose live rows are no prefix, or that do not
# say what a row is, are refused. Mutant: a storage that is known by its address alone (no weak
# reference in csrc/saved_hooks/saved_storages.h) turns these red.
import pytest
import torch
from support import randn, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch import saved as saved_hooks
from transformer_engine.pytorch.tensor import Float8CurrentScalingQuantizer


def one(device, dtype=torch.int32):
    return torch.zeros(1, dtype=dtype, device=device)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.uint8])
def test_declared_rows_are_found(dtype, device):
    t, counter = randn(256, 8, device=device), one(device, dtype)
    assert saved_hooks.live_rows(t) is None
    saved_hooks.mark_pageable(t, counter, 128)
    for same in (t, t.detach(), t.view(256, 2, 4), t.view(torch.int32), t[:], t.view(-1, 8)):
        found, unit = saved_hooks.live_rows(same)
        assert found.data_ptr() == counter.data_ptr() and unit == 128
    for other in (t[:128], t[1:], t.T, t.view(-1), t.view(128, 16), t[:, :4], t.clone(), t[:0]):
        assert saved_hooks.live_rows(other) is None
    square = randn(8, 8, device=device)
    saved_hooks.mark_pageable(square, counter)
    assert saved_hooks.live_rows(square) and saved_hooks.live_rows(square.T) is None  # its rows are columns there


def test_parts_of_one_buffer_and_words_that_replace_others(device):
    whole, counters = randn(64, 8, device=device), [one(device) for _ in range(3)]
    halves = whole[:32], whole[32:]
    for half, counter in zip(halves, counters[:2], strict=True):
        saved_hooks.mark_pageable(half, counter)
    saved_hooks.mark_pageable(halves[1], counters[2], 4)
    assert saved_hooks.live_rows(whole) is None
    assert [saved_hooks.live_rows(half)[0].data_ptr() for half in halves] == [counters[i].data_ptr() for i in (0, 2)]
    assert [saved_hooks.live_rows(half)[1] for half in halves] == [1, 4]
    row = randn(1, 8, device=device)
    saved_hooks.mark_pageable(row, counters[0])
    assert saved_hooks.live_rows(row) and saved_hooks.live_rows(row[:, :4]) is None  # as many rows, but shorter ones
    vector = randn(16, device=device)
    saved_hooks.mark_pageable(vector, counters[0], 16)
    assert saved_hooks.live_rows(vector)[1] == 16


def test_rows_end_with_the_memory(device):
    counter = one(device)
    for _ in range(4):
        t = torch.zeros(1000, device=device)
        assert saved_hooks.live_rows(t) is None  # perhaps at the address of the last one
        saved_hooks.mark_pageable(t, counter)
        del t


def test_live_rows_are_looked_up_when_a_tensor_is_saved(device):
    t, counter, found_rows = randn(8, 4, device=device), one(device), []
    saved_hooks.mark_pageable(t, counter, 2)

    class Handler(saved_hooks.StorageHandler):
        def take(self, tensor):
            found_rows.append(saved_hooks.live_rows(tensor))

    x = torch.ones(8, 4, device=device, requires_grad=True)
    with saved_hooks.Hooks(Handler()):
        (x * t).sum()
    assert [found and (found[0].data_ptr(), found[1]) for found in found_rows] == [(counter.data_ptr(), 2)]


def test_what_is_ambiguous_is_refused(device):
    op, t, counter = "mark_pageable", randn(12, 8, device=device), one(device)
    quantized = Float8CurrentScalingQuantizer(te.DType.kFloat8E4M3, torch.device(device))(randn(16, 16, device=device))
    for wrong in (None, [t], quantized, torch.nn.Parameter(t), t.to_sparse()):
        with refused(TypeError, op, "'tensor'", "plain torch.Tensor"):
            saved_hooks.mark_pageable(wrong, counter)
    with refused(TypeError, op, "'counter'", "int"):
        saved_hooks.mark_pageable(t, 3)
    for wrong in (t.view(3, 4, 8), t[0, 0]):
        with refused(ValueError, op, list(wrong.shape), "one or two dimensions", "flatten"):
            saved_hooks.mark_pageable(wrong, counter)
    for wrong in (t.T, t[:, :4], t[::2]):
        with refused(ValueError, op, "strides", "contiguous"):
            saved_hooks.mark_pageable(wrong, counter)
    with refused(ValueError, op, "12 rows", "multiple", "8"):
        saved_hooks.mark_pageable(t, counter, 8)
    for wrong in (0, -1, True, 1.0, "2"):
        with refused(ValueError, op, "'unit_rows'", repr(wrong)):
            saved_hooks.mark_pageable(t, counter, wrong)
    wrongs = [one(device, torch.float32), one(device, torch.bool), torch.zeros(2, dtype=torch.int32, device=device)]
    for wrong in wrongs + ([one("cpu")] if device == "cuda" else []):
        with refused(ValueError, op, "'counter'", "one integer"):
            saved_hooks.mark_pageable(t, wrong)
    assert saved_hooks.live_rows(t) is None
