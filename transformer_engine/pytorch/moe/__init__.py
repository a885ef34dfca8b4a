"""Mixtures of experts: the router, the experts' MLPs, and the layer made of both."""

from transformer_engine.pytorch.moe.from_hf import moe_state_from_hf as moe_state_from_hf
from transformer_engine.pytorch.moe.grouped_mlp import GroupedMLP as GroupedMLP
from transformer_engine.pytorch.moe.moe_mlp import MoEMLP as MoEMLP
from transformer_engine.pytorch.moe.topk_router import Routing as Routing
from transformer_engine.pytorch.moe.topk_router import TopKRouter as TopKRouter
