"""Private names of PyTorch, which may change with any minor version, each with the versions that have it.

No other file of the package uses a private name of PyTorch (tests/policy/test_torch_private.py). A new minor version is
supported when each name here exists and behaves the same, which qa/torch_versions.sh tests.
"""

import torch
import torch.nn.attention
import torch.utils._python_dispatch
import torch.utils._pytree

are_functorch_transforms_active = torch._C._are_functorch_transforms_active  # 2.9 - 2.15
assert_async = torch._assert_async  # 2.9 - 2.15
check = torch._check  # 2.9 - 2.15
construct_storage_from_data_pointer = torch._C._construct_storage_from_data_pointer  # 2.9 - 2.15
current_graph_task_id = torch._C._current_graph_task_id  # 2.9 - 2.15
debug_has_internal_overlap = torch._debug_has_internal_overlap  # 2.9 - 2.15
disable_current_modes = torch.utils._python_dispatch._disable_current_modes  # 2.9 - 2.15
disable_dynamo = torch._disable_dynamo  # 2.9 - 2.15
disabled_torch_function_impl = torch._C._disabled_torch_function_impl  # 2.9 - 2.15
DisableFuncTorch = torch._C._DisableFuncTorch  # 2.9 - 2.15
execution_engine = torch.autograd.Variable._execution_engine  # 2.9 - 2.15
foreach_copy_ = torch._foreach_copy_  # 2.9 - 2.15
foreach_mul = torch._foreach_mul  # 2.9 - 2.15
has_any_global_hook = torch.nn.modules.module._has_any_global_hook  # 2.9 - 2.15
has_compatible_shallow_copy_type = torch._has_compatible_shallow_copy_type  # 2.9 - 2.15
IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys  # 2.9 - 2.15
increment_version = torch._C._increment_version  # 2.9 - 2.15; torch.autograd.graph's, without its frame
is_in_torch_dispatch_mode = torch.utils._python_dispatch.is_in_torch_dispatch_mode  # 2.9 - 2.15
# Of builds with NCCL.
make_nccl_premul_sum = getattr(torch.distributed, "_make_nccl_premul_sum", None)  # 2.9 - 2.15
make_subclass = torch.Tensor._make_subclass  # 2.9 - 2.15
make_wrapper_subclass = torch.Tensor._make_wrapper_subclass  # 2.9 - 2.15
peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack  # 2.9 - 2.15
pytree = torch.utils._pytree  # 2.9 - 2.15
unsafe_preserve_version_counter = torch.autograd._unsafe_preserve_version_counter  # 2.9 - 2.15
flash_attention_forward = torch.ops.aten._flash_attention_forward  # 2.9 - 2.15


def current_flash_attention_impl() -> str | None:  # 2.9 - 2.15
    """The implementation that is active in place of torch's flash attention; torch before 2.11 may have none."""
    current = getattr(torch.nn.attention, "current_flash_attention_impl", None)
    return None if current is None else current()


def user_error() -> tuple[type, object]:  # 2.9 - 2.15
    """Dynamo's class of errors of user code, and the type of an error about an input. Imports Dynamo."""
    from torch._dynamo.exc import UserError, UserErrorType

    return UserError, UserErrorType.INVALID_INPUT


def break_graph(reason: str) -> None:  # 2.9 - 2.15
    """Ends a graph of Dynamo, whose code goes on in eager; with fullgraph=True an error with that reason."""
    import torch._dynamo

    torch._dynamo.graph_break(msg=reason)


def symmetric_memory():  # 2.9 - 2.15
    """torch's module of symmetric memory, which a build without CUDA may lack."""
    import torch.distributed._symmetric_memory as module

    return module


def group_store(group: object) -> object:  # 2.9 - 2.15
    """The key-value store of a process group's ranks."""
    return torch.distributed.distributed_c10d._get_process_group_store(group)


def group_timeout(group: object, device: torch.device) -> object:  # 2.9 - 2.15
    """How long the collectives of a process group wait for other ranks: a timedelta."""
    return group._get_backend(device).options._timeout


# Collectives by the group's own methods, None for all processes: the checks of torch.distributed's functions take twice
# as long as these.


def start_all_reduce(tensor: torch.Tensor, op: object, group: object) -> object:  # 2.9 - 2.15
    """torch.distributed.all_reduce(async_op=True)."""
    options = torch.distributed.AllreduceOptions()
    options.reduceOp, options.asyncOp = op, True
    return _group(group).allreduce([tensor], options)


def start_reduce_scatter(shard: torch.Tensor, full: torch.Tensor, op: object, group: object) -> object:  # 2.9 - 2.15
    """torch.distributed.reduce_scatter_tensor(async_op=True)."""
    options = torch.distributed.ReduceScatterOptions()
    options.reduceOp, options.asyncOp = op, True
    return _group(group)._reduce_scatter_base(shard, full, options)


def start_all_gather(full: torch.Tensor, shard: torch.Tensor, group: object) -> object:  # 2.9 - 2.15
    """torch.distributed.all_gather_into_tensor(async_op=True)."""
    options = torch.distributed.distributed_c10d.AllgatherOptions()
    options.asyncOp = True
    return _group(group)._allgather_base(full, shard, options)


def _group(group: object) -> object:  # 2.9 - 2.15
    return torch.distributed.group.WORLD if group is None else group


def current_raw_stream(device: torch.device) -> int:  # 2.9 - 2.15
    """The handle of a GPU's current stream, without an object of it."""
    return torch._C._cuda_getCurrentRawStream(device.index)


def cuda_sleep(cycles: int) -> None:  # 2.9 - 2.15
    torch.cuda._sleep(cycles)


def end_allocations_to_pool(device: int, pool: object) -> None:  # 2.9 - 2.15
    """Ends the allocations to a capture's memory pool, for a capture whose end failed."""
    torch._C._cuda_endAllocateToPool(device, pool)
    torch._C._cuda_releasePool(device, pool)
