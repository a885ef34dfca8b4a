"""Recomputation, random states and collectives: the names that clients import from `.distributed`."""

from transformer_engine.pytorch.distributed.collectives import allreduce as allreduce
from transformer_engine.pytorch.distributed.collectives import gather_along_first_dim as gather_along_first_dim
from transformer_engine.pytorch.distributed.collectives import (
    reduce_scatter_along_first_dim as reduce_scatter_along_first_dim,
)
from transformer_engine.pytorch.distributed.recompute import (
    activation_recompute_forward as activation_recompute_forward,
)
from transformer_engine.pytorch.distributed.recompute import checkpoint as checkpoint
from transformer_engine.pytorch.distributed.recompute import (
    in_fp8_activation_recompute_phase as in_fp8_activation_recompute_phase,
)
from transformer_engine.pytorch.distributed.recompute import (
    is_fp8_activation_recompute_enabled as is_fp8_activation_recompute_enabled,
)
from transformer_engine.pytorch.distributed.rng import CudaRNGStatesTracker as CudaRNGStatesTracker
from transformer_engine.pytorch.distributed.rng import get_all_rng_states as get_all_rng_states
