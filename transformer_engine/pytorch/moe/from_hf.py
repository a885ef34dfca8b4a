"""Weights of Hugging Face's Mixtral and Qwen3-MoE under the names of MoEMLP: of files, which have tensors for each
expert, or of transformers 5, whose layers have one tensor of all. Nothing is computed here."""

import re
from collections.abc import Mapping, Sequence

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
_STACKED = ("gate.weight", "experts.gate_up_proj", "experts.down_proj")  # in the layers of transformers 5


def moe_state_from_hf(
    state_dict: Mapping[str, torch.Tensor], prefix: str = "", experts: tuple[int, int] | None = None
) -> dict[str, torch.Tensor]:
    """The state dict of a MoEMLP (activation="swiglu") from that of a MixtralSparseMoeBlock or Qwen3MoeSparseMoeBlock.

    state_dict: of a checkpoint, in which `prefix` comes before the layer's names, such as
    "model.layers.0.block_sparse_moe." (Mixtral) or "model.layers.0.mlp." (Qwen3-MoE). experts: MoEMLP's. gate and up
    projections become fc1, gate first; down projections fc2. The experts' tensors gate_up_proj and down_proj of
    transformers 5 are taken as they are, views of the range, so that load_state_dict is the only copy. Both models take
    softmax over the chosen logits (Qwen3-MoE with norm_topk_prob=True), which is MoEMLP's default.
    The router's rows are the number of experts. Experts outside of the range need not be there.
    Errors: KeyError that names the missing tensor; ValueError for a layer of neither model, for a range that the layer
    does not have, for a router with fewer rows than there are experts, and for experts of different shapes.
    """
    op = "moe_state_from_hf"
    if prefix + _STACKED[1] in state_dict:
        return _of_stacks(op, *((prefix + name, state_dict[prefix + name]) for name in _STACKED), experts)
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
        halves = [prefix + half.format(i) for i in range(first, last) for half in (gate, up)]
        downs = [prefix + down.format(i) for i in range(first, last)]
        one, two = _matrices(op, state_dict, halves), _matrices(op, state_dict, downs)
        return {
            "router.weight": weight,
            "experts.fc1.weight": torch.cat(one).view(last - first, -1, one[0].shape[1]),
            "experts.fc2.weight": torch.stack(two),
        }
    raise ValueError(
        f"{op}: no experts of {' or '.join(_NAMES)} are under prefix {prefix!r}; wanted a name like "
        f"{[prefix + names[1].format(0) for names in _NAMES.values()]}."
    )


def _matrices(op: str, state_dict: Mapping[str, torch.Tensor], names: Sequence[str]) -> list[torch.Tensor]:
    """The tensors with these names, of one shape."""
    found = [state_dict[name] for name in names]
    for name, tensor in zip(names, found, strict=True):
        if tensor.dim() != 2 or tensor.shape != found[0].shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, wanted a matrix of the shape of {names[0]}, "
                f"{list(found[0].shape)}."
            )
    return found


def _of_stacks(
    op: str,
    router: tuple[str, torch.Tensor],
    up: tuple[str, torch.Tensor],
    down: tuple[str, torch.Tensor],
    experts: tuple[int, int] | None,
) -> dict[str, torch.Tensor]:
    """Of names and tensors of the experts together."""
    count, width = router[1].shape if router[1].dim() == 2 else (0, 0)
    hidden = down[1].shape[-1]
    for (name, tensor), shape in ((up, (count, 2 * hidden, width)), (down, (count, width, hidden))):
        if tensor.shape != shape:
            raise ValueError(
                f"{op}: {name} has shape {list(tensor.shape)}, wanted {list(shape)} beside {router[0]} "
                f"{list(router[1].shape)}: gate and up projections of each expert as rows, and its down projection."
            )
    first, last = expert_range(op, experts, count)
    return {
        "router.weight": router[1],
        "experts.fc1.weight": up[1][first:last],
        "experts.fc2.weight": down[1][first:last],
    }
