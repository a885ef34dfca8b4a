"""Weights of Hugging Face's Mixtral and Qwen3-MoE under the names of MoEMLP. Nothing is computed here."""

from collections.abc import Mapping

import torch

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
    Errors: KeyError that names the missing tensor; ValueError for a layer of neither model.
    """
    for router, gate, up, down in _NAMES.values():
        count = 0
        while prefix + gate.format(count) in state_dict:
            count += 1
        if count == 0:
            continue
        first, last = (0, count) if experts is None else experts
        found = {"router.weight": state_dict[prefix + router]}
        for i in range(first, last):
            halves = [state_dict[prefix + half.format(i)] for half in (gate, up)]
            found[f"experts.fc1.weight{i - first}"] = torch.cat(halves)
            found[f"experts.fc2.weight{i - first}"] = state_dict[prefix + down.format(i)]
        return found
    raise ValueError(
        f"moe_state_from_hf: no experts of {' or '.join(_NAMES)} are under prefix {prefix!r}; wanted a name like "
        f"{[prefix + names[1].format(0) for names in _NAMES.values()]}."
    )
