# Generated programs under offload: layers of every kind in any order, quantized and marked tensors, views, checkpoints
# in and around, both schedules, microbatches in flight, evaluations, writes in place, exceptions, partial backwards.
# The results equal those without offload, to the bit; layers leave and return as guide/offload.md describes; nothing is
# left behind. `--generated=N` runs N programs.
import warnings

import pytest
from support import assert_same_bits

from .cases import small  # noqa: F401
from .program_runs import Run
from .programs import Refused, make

pytestmark = pytest.mark.usefixtures("small", "fp8_left_off")

GENERATED = 40


def test_a_program(generated_seed, device):
    program = make(generated_seed)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", "None of the inputs have requires_grad=True")
        refuses = False
        try:
            expected = Run(program, device, offload=False).execute()
        except Refused:  # the overwritten tensor was saved; with offload it may have been copied
            refuses, expected = True, Run(program, device, offload=False, cloned=True).execute()
        ours, refused = Run(program, device, offload=True), False
        try:
            ours.execute()
        except Refused:
            refused = ours.failed = True
        assert refuses or not refused, "a write to an unused tensor was refused"
        ours.close()
    assert refused or len(ours.records) == len(expected.records)
    for (what, got), (wanted_what, wanted) in zip(ours.records, expected.records, strict=False):
        assert what == wanted_what
        assert_same_bits(got, wanted, what)
