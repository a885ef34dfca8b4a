"""Options of DistributedDataParallel, checked when they are made. No tensor and no process group is here."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, TypeVar

OP = "DistributedDataParallelConfig"
_SIZES = ("bucket_size", "num_buckets")
# Options of other libraries: the only value that is built, and a sentence on others.
_NOT_BUILT: dict[str, tuple[Any, str]] = {
    "num_distributed_optimizer_instances": (1, "one: each bucket is cut over all ranks of 'process_group'"),
    "nccl_ub": (False, "False: buffers are the device's ordinary memory, which is not registered with NCCL"),
    "param_name_patterns_for_fp32_local_accumulation": (
        (), "none, and grad_reduce_in_fp32=True: main_grad of all parameters is float32"
    ),
    "fp4_param_gather": (False, "False: weights are gathered as FP8 bytes (quantized_model_init) or in their dtype"),
    "reuse_grad_buf_for_mxfp8_param_ag": (
        False, "False, and weights of current, delayed or 128x128 block scaling (quantized_model_init)"
    ),
}  # fmt: skip
_Class = TypeVar("_Class", bound=type)


def _refusing(cls: _Class) -> _Class:
    """The signature stays: it has what can be chosen."""
    made = cls.__init__

    @functools.wraps(made)
    def init(self: Any, *args: Any, **options: Any) -> None:
        for name, (done, instead) in _NOT_BUILT.items():
            given = options.pop(name, done)
            if done == () and type(given) in (list, tuple, set, frozenset):
                given = tuple(given)  # any empty sequence means none
            if type(given) is not type(done) or given != done:
                raise NotImplementedError(
                    f"{OP}: argument '{name}' is {given!r}, which is not built; wanted {instead}."
                )
        made(self, *args, **options)

    cls.__init__ = init
    return cls


@_refusing
@dataclasses.dataclass
class DistributedDataParallelConfig:
    """grad_reduce_in_fp32: main_grad is float32, else it has the parameter's dtype (FP8 weights: their nominal one).
    overlap_grad_reduce: a bucket's gradients are reduced as soon as they are complete, during backward.
    overlap_param_gather: with use_distributed_optimizer, weights are gathered during the next forward.
    align_param_gather: forward hooks wait for weights, but dispatch no gather; a schedule calls start_param_sync().
    use_distributed_optimizer: gradients are reduce-scattered, and weights gathered from the shards of the ranks.
    check_for_nan_in_grad: norms of the local gradients before each collective; one that is not finite is an error.
    average_in_collective: the collective averages, in place of a sum of scaled gradients.
    fp8_param_gather: accepted for frameworks that set it; FP8 weights are gathered as bytes in any case.
    bucket_size: elements after which a bucket closes; num_buckets: how many buckets a buffer gets, in its place.
    pad_buckets_for_high_nccl_busbw: the ends of sharded buckets are multiples of 2^16 elements.
    reduce_scatter_with_fp32_accumulation: gradients of 16 bits travel as they are and are summed in float32.
    reproducible: sums of every dtype in the order of the ranks, in float32, scaled after the sum.
    find_unused_parameters: a parameter without a gradient counts with zeros when the gradients are finished.
    debug: shards of other ranks are NaN from the step until they are gathered.

    Errors: ValueError for a value of the wrong type and for options that contradict each other; NotImplementedError,
    with what to use in its place, for these of other libraries, unless they have the value that changes nothing:
    num_distributed_optimizer_instances, nccl_ub, param_name_patterns_for_fp32_local_accumulation, fp4_param_gather,
    reuse_grad_buf_for_mxfp8_param_ag."""

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    check_for_nan_in_grad: bool = False
    average_in_collective: bool = False
    fp8_param_gather: bool = False
    bucket_size: int | None = None
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    reproducible: bool = False
    find_unused_parameters: bool = False
    debug: bool = False

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in _SIZES:
                if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                    raise ValueError(f"{OP}: argument '{field.name}' is {value!r}, wanted None or an int > 0.")
            elif not isinstance(value, bool):
                raise ValueError(f"{OP}: argument '{field.name}' is {value!r}, wanted True or False.")
        if self.bucket_size is not None and self.num_buckets is not None:
            raise ValueError(
                f"{OP}: arguments 'bucket_size' ({self.bucket_size}) and 'num_buckets' ({self.num_buckets}) are both "
                "given, wanted one of them: either decides where buckets end."
            )
        for name in ("reproducible", "reduce_scatter_with_fp32_accumulation"):
            if self.average_in_collective and getattr(self, name):
                raise ValueError(
                    f"{OP}: arguments 'average_in_collective' and '{name}' are both True, wanted one of them: sums in "
                    "the order of the ranks are not made by the collective."
                )
