"""Recomputation, random states and collectives: the names that clients import from `.distributed`."""

from transformer_engine.pytorch._internal.recompute_phase import (
    activation_recompute_forward as activation_recompute_forward,
)
from transformer_engine.pytorch._internal.recompute_phase import (
    in_fp8_activation_recompute_phase as in_fp8_activation_recompute_phase,
)
from transformer_engine.pytorch.distributed.absent import FullyShardedDataParallel as FullyShardedDataParallel
from transformer_engine.pytorch.distributed.absent import get_symmetric_memory_tensor as get_symmetric_memory_tensor
from transformer_engine.pytorch.distributed.absent import prepare_te_modules_for_fsdp as prepare_te_modules_for_fsdp
from transformer_engine.pytorch.distributed.absent import release_symm_mem_pool as release_symm_mem_pool
from transformer_engine.pytorch.distributed.absent import symm_mem_alloc as symm_mem_alloc
from transformer_engine.pytorch.distributed.collectives import allreduce as allreduce
from transformer_engine.pytorch.distributed.collectives import gather_along_first_dim as gather_along_first_dim
from transformer_engine.pytorch.distributed.collectives import (
    reduce_scatter_along_first_dim as reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.distributed.gradients import (
    allreduce_sequence_parallel_grads as allreduce_sequence_parallel_grads,
)
from transformer_engine.pytorch.distributed.groups import get_distributed_rank as get_distributed_rank
from transformer_engine.pytorch.distributed.groups import get_distributed_world_size as get_distributed_world_size
from transformer_engine.pytorch.distributed.linear import column_linear as column_linear
from transformer_engine.pytorch.distributed.linear import row_linear as row_linear
from transformer_engine.pytorch.distributed.peer import CommTimeout as CommTimeout
from transformer_engine.pytorch.distributed.recompute import checkpoint as checkpoint
from transformer_engine.pytorch.distributed.recompute import (
    is_fp8_activation_recompute_enabled as is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.distributed.regions import (
    copy_to_tensor_model_parallel_region as copy_to_tensor_model_parallel_region,
)
from transformer_engine.pytorch.distributed.regions import (
    gather_from_sequence_parallel_region as gather_from_sequence_parallel_region,
)
from transformer_engine.pytorch.distributed.regions import (
    reduce_from_tensor_model_parallel_region as reduce_from_tensor_model_parallel_region,
)
from transformer_engine.pytorch.distributed.regions import (
    reduce_scatter_to_sequence_parallel_region as reduce_scatter_to_sequence_parallel_region,
)
from transformer_engine.pytorch.distributed.regions import (
    scatter_to_sequence_parallel_region as scatter_to_sequence_parallel_region,
)
from transformer_engine.pytorch.distributed.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch.distributed.rng import get_all_rng_states as get_all_rng_states
from transformer_engine.pytorch.distributed.sharded_state import (
    load_tensor_parallel_state_dict as load_tensor_parallel_state_dict,
)
from transformer_engine.pytorch.distributed.sharded_state import (
    tensor_parallel_state_dict as tensor_parallel_state_dict,
)
from transformer_engine.pytorch.distributed.symmetric import symmetric_all_reduce as symmetric_all_reduce
from transformer_engine.pytorch.distributed.usage import CommUsage as CommUsage
from transformer_engine.pytorch.distributed.usage import comm_usage as comm_usage
