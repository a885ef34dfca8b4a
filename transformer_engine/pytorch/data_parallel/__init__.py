"""Data parallelism: contiguous buffers of gradients and weights, reduced and gathered in buckets."""

from transformer_engine.pytorch.data_parallel.buffers import ParamAndGradBuffer as ParamAndGradBuffer
from transformer_engine.pytorch.data_parallel.config import (
    DistributedDataParallelConfig as DistributedDataParallelConfig,
)
from transformer_engine.pytorch.data_parallel.groups import BucketGroup as BucketGroup
from transformer_engine.pytorch.data_parallel.groups import partition_buckets as partition_buckets
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer as DistributedOptimizer
from transformer_engine.pytorch.data_parallel.wrapper import DistributedDataParallel as DistributedDataParallel
from transformer_engine.pytorch.data_parallel.wrapper import ensure_params_ready as ensure_params_ready
