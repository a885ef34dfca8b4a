# Random programs over captured callables equal eager ones, bit for bit: schedules, shared buffers, checkpoints,
# recipes, microbatches in flight, weight gradients everywhere, refused calls, exceptions in captures, writes to tensors
# of pending backwards. --generated=N runs N programs; a failure prints its program.
import pytest
from ranks import on_ranks

from . import workers
from .program_runs import run
from .programs import generated

GENERATED = 40  # 0.3 s each


@pytest.mark.filterwarnings("ignore:.*captured in train mode, called in eval mode")
@pytest.mark.usefixtures("fp8_left_off")
def test_programs(device, generated_seed):
    program = generated(generated_seed)
    # CUDA generators cannot be restored within a capture, which raises; the CPU backend can.
    draws = device == "cuda" and any(x.inside and x.family == "dropout" for chunk in program.chunks for x in chunk)
    try:
        run(program, device)
    except Exception as error:
        if draws and isinstance(error, NotImplementedError) and "draws random numbers" in str(error):
            return
        raise AssertionError(f"{type(error).__name__}: {error}\n{program}") from error


@pytest.mark.usefixtures("fp8_left_off")
def test_a_write_to_parameters_that_no_backward_reads(device):
    """The backward reads cached FP8 weights: the gradients are right, and later calls use the new biases."""
    assert run(generated(228), device) == "written to: {'kept': True}"


@pytest.mark.dist
def test_programs_on_two_ranks(request):
    """The ranks start once for all programs, whose number is a twentieth of the option."""
    count = request.config.getoption("generated", None)
    seeds = range(3 if count is None else max(1, count // 20))
    for rank, found in enumerate(on_ranks(workers.generated_programs, seeds, device="cpu")):
        assert not found, f"rank {rank}: " + "\n".join(found.values())
