"""The grouped linear layer of GroupedMLP, whose weights are one parameter, and checkpoints from when each group had its
own. GroupedLinear computes, quantizes and has the weight gradients."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial

import torch
from torch.overrides import is_tensor_like

from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule
from transformer_engine.pytorch.module.group_splits import Splits
from transformer_engine.pytorch.module.grouped_linear import GroupedCall, GroupedLinear


class StackedGroupedLinear(GroupedLinear):
    """GroupedLinear without biases whose weights are one parameter, `weight` [num_gemms, out_features, in_features]:
    one gradient and one main_grad, with the bits and the initial values of a parameter for each group. State dicts with
    `weight0`, `weight1`, ... load."""

    def _declare_groups(self, init_method: InitMethod) -> None:
        self._declare(
            "weight",
            (self.num_gemms, self.out_features, self.in_features),
            partial(_init_each, init_method),
            tensor_model_parallel=True,
            partition_dim=1 + int(self.parallel_mode == "row"),
            partition_stride=1,
            stacked=True,  # optimizers load the states of num_gemms matrices
            **self._product_tags(),
        )

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        return ["weight"], []

    def _settle(self, before) -> None:
        TransformerEngineBaseModule._settle(self, before)  # without attributes for absent biases

    def call_of(self, inp: torch.Tensor, splits: Splits, is_first_microbatch: bool | None) -> GroupedCall:
        call = super().call_of(inp, splits, is_first_microbatch)
        weight = call.weights[0]  # a parametrization, or memory of a client, may have another layout
        return GroupedCall(weight if weight.is_contiguous() else weight.contiguous(), *call[1:])

    def _matrices(self, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        stack = weights[0].detach()
        if stack.dim() != 3 or stack.shape[0] != self.num_gemms:
            raise ValueError(
                f"{type(self).__name__}: parameter 'weight' is {list(stack.shape)}, wanted "
                f"[{self.num_gemms}, {self.out_features}, {self.in_features}], a matrix for each group."
            )
        return list(stack.unbind(0))

    # ---- state dicts ----

    def _unstacked(self, state_dict: Mapping[str, object], prefix: str) -> Mapping[str, object]:
        """The entries of a checkpoint, with weights that are rows of one matrix as a stack of matrices."""
        key = f"{prefix}weight"
        rows, wanted = state_dict.get(key), self.weight.shape
        if not isinstance(rows, torch.Tensor) or rows.shape != (wanted[0] * wanted[1], wanted[2]):
            return state_dict
        return {**state_dict, key: rows.view(wanted)}

    def _named_as(self, own: Mapping[str, object], given: Mapping[str, object], prefix: str) -> Mapping[str, object]:
        """This module's entries under the names of a checkpoint that has a weight for each group."""
        key, weight = f"{prefix}weight", self.weight
        if not self._each(given, prefix) or type(weight) is not torch.nn.Parameter:
            return own
        parts = zip(self._names(prefix), weight.detach().unbind(0), strict=True)
        return {name: value for name, value in own.items() if name != key} | dict(parts)

    def _names(self, prefix: str) -> list[str]:
        return [f"{prefix}weight{i}" for i in self._products]

    def _each(self, state_dict: Mapping[str, object], prefix: str) -> dict[str, object]:
        """The entries of a checkpoint that has a weight for each group, all or some of them. Empty where
        a parametrization computes the weight, as torch loads its parameters then."""
        if f"{prefix}weight" in state_dict or "weight" not in self._parameters:
            return {}
        return {name: state_dict[name] for name in self._names(prefix) if name in state_dict}

    def _load_from_state_dict(self, state_dict, prefix, metadata, strict, missing, unexpected, errors):
        each, key = self._each(state_dict, prefix), f"{prefix}weight"
        assigns = metadata.get("assign_to_params_buffers", False)
        refused = self._refused(state_dict, prefix, assigns)
        errors += refused
        if each:
            state_dict = {name: value for name, value in state_dict.items() if name not in each}
        if each and (assigns or refused):
            state_dict[key] = self.weight if refused else torch.stack([value.detach() for value in each.values()])
        super()._load_from_state_dict(state_dict, prefix, metadata, strict, missing, unexpected, errors)
        if each and not assigns and not refused:  # only now, because hooks of the call above may have waited for it
            if key in missing:
                missing.remove(key)
                missing += [name for name in self._names(prefix) if name not in each]
            self._copy(each, prefix, errors)

    def _refused(self, given: Mapping[str, object], prefix: str, assign: bool) -> list[str]:
        """Why a checkpoint with a weight for each group is not loaded, whatever its shapes."""
        names = [name for name in self._names(prefix) if name in given]
        weight = self._parameters.get("weight")
        if not names or weight is None:
            return []
        stack = f"{prefix}weight is one parameter for all groups"
        advice = "load it into a module that is not sharded, whose state_dict() has one tensor for all groups."
        if f"{prefix}weight" in given:
            return [
                f"{stack}, and the checkpoint has it beside {', '.join(names)}, wanted one of both forms; where "
                f"set_model_state_dict(full_state_dict=True) has added it to a checkpoint of before, {advice}"
            ]
        if type(weight) is not torch.nn.Parameter:
            return [f"{stack}, here a {type(weight).__name__}, and the checkpoint has {', '.join(names)}; {advice}"]
        return self._not_to_assign(self._each(given, prefix), prefix) if assign else []

    def _not_to_assign(self, each: Mapping[str, object], prefix: str) -> list[str]:
        """Why a weight for each group cannot be assigned as one parameter."""
        absent = [name for name in self._names(prefix) if name not in each]
        plain = all(type(value) in (torch.Tensor, torch.nn.Parameter) for value in each.values())
        kinds = {f"{v.dtype} {list(v.shape)} on {v.device}" if plain else type(v).__name__ for v in each.values()}
        if plain and not absent and len(kinds) == 1:
            return []
        found = f"lacks {', '.join(absent)}" if absent else f"has {', '.join(sorted(kinds))}"
        return [
            f"{prefix}weight is one parameter for all groups, which assign=True makes of a plain tensor for each of "
            f"them, of one shape, dtype and device: the checkpoint {found}; load it with assign=False."
        ]

    @torch.no_grad()
    def _copy(self, each: Mapping[str, object], prefix: str, errors: list[str]) -> None:
        weight = self.weight.detach()
        if weight.is_meta:
            warnings.warn(
                f"{prefix}weight is on meta, and stays without the values of the checkpoint; load with assign=True, or "
                "call to_empty() before.",
                stacklevel=2,
            )
        for name, part in zip(self._names(prefix), weight.unbind(0), strict=True):
            if name not in each:
                continue
            value = each[name]
            if not is_tensor_like(value):
                errors.append(f"type mismatch for {name}: the checkpoint's is {type(value).__name__}, wanted a tensor.")
            elif value.shape != part.shape:
                got, wanted = tuple(value.shape), tuple(part.shape)
                errors.append(f"size mismatch for {name}: the checkpoint's is {got}, wanted {wanted}.")
            else:
                try:
                    part.copy_(value)
                except Exception as error:  # torch too raises one error for all tensors
                    errors.append(f"{name}, {tuple(value.shape)}, was not copied: {error}")


def _init_each(init_method: InitMethod, weight: torch.Tensor) -> None:
    """Of each matrix by itself, in their order: its fan is its own, and the draws are those of separate parameters."""
    for matrix in weight.unbind(0):
        init_method(matrix)
