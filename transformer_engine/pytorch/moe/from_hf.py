"""Weights of Hugging Face's Mixtral and Qwen3-MoE under the names of MoEMLP. Nothing is computed here."""

import re
from collections.abc import Mapping

import torch

from transformer_engine.pytorch.moe.moe_mlp import expert_range

# The names of a layer's router and of an expert's gate, up and down projections.
_NAMES = {
    "Mixtral": ("gate.weight", "experts.{}.w1.weight", "experts.{}.w3.weight", "experts.{}.w2.weight"),
    "Qwen3-MoE": (
        "gate.weight",
        "experts.{}.gate_proj.weight",
        "experts.{}.up_proj.weight",
        "experts.{}.down_proj.weight",
    ),
}


def moe_state_from_hf(
    state_dict: Mapping[str, torch.Tensor], prefix: str = "", experts: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """The state dict of a MoEMLP (activation="swiglu") from that of a MixtralSparseMoeBlock or Qwen3MoeSparseMoeBlock.

    state_dict: of a checkpoint, in which `prefix` comes before the layer's names, such as
    "model.layers.0.block_sparse_moe." (Mixtral) or "model.layers.0.mlp." (Qwen3-MoE). experts: MoEMLP's. gate and up
    projections become fc1, gate first; down projections fc2. Both models take softmax over the chosen logits
    (Qwen3-MoE with norm_topk_prob=True), which is MoEMLP's default.
    The router's rows are the number of experts. Experts outside of the range need not be there.
    Errors: KeyError that names the missing tensor; ValueError for a layer of neither model, for a range that the layer
    does not have, and for a router with fewer rows than there are experts.
    """
    op = "moe_state_from_hf"
    for router, gate, up, down in _NAMES.values():
        wanted = re.compile(re.escape(prefix) + "([0-9]+)".join(map(re.escape, gate.split("{}"))))
        numbers = [int(match[1]) for match in map(wanted.fullmatch, state_dict) if match]
        if not numbers:
            continue
        weight = state_dict[prefix + router]
        count = weight.shape[0] if weight.dim() == 2 else 0
        if max(numbers) >= count:
            raise ValueError(
                f"{op}: {prefix + router} has shape {list(weight.shape)}, wanted a row for each expert, as "
                f"{prefix + gate.format(max(numbers))} is there."
            )
        first, last = expert_range(op, experts, count)
        found = {"router.weight": weight}
        for i in range(first, last):
            halves = [state_dict[prefix + half.format(i)] for half in (gate, up)]
            found[f"experts.fc1.weight{i - first}"] = torch.cat(halves)
            found[f"experts.fc2.weight{i - first}"] = state_dict[prefix + down.format(i)]
        return found
    raise ValueError(
        f"{op}: no experts of {' or '.join(_NAMES)} are under prefix {prefix!r}; wanted a name like "
        f"{[prefix + names[1].format(0) for names in _NAMES.values()]}."
    )
