"""load_state_dict that loads a checkpoint completely, or raises and changes nothing. Modules define their entries."""

from collections.abc import Mapping

import torch
from torch.overrides import is_tensor_like

from transformer_engine.pytorch._internal.torch_private import IncompatibleKeys


def is_extra_state(key: str) -> bool:
    return key.rpartition(".")[2] == "_extra_state"


class AtomicCheckpoints(torch.nn.Module):
    """A module whose load_state_dict compares the whole checkpoint with it before the first tensor is copied. As part
    of another module it loads as torch does: torch copies the entries that fit and raises afterwards."""

    def load_state_dict(
        self, state_dict: Mapping[str, object], strict: bool = True, assign: bool = False
    ) -> IncompatibleKeys:
        """As torch's. Errors: RuntimeError naming missing and unexpected keys (if strict), shapes that differ and
        values that are complex or not tensors, NotImplementedError for state that this version cannot load; nothing has
        been loaded then."""
        # A hook may rename keys: only after it has run is it known which entries fit.
        hooked = any(part._load_state_dict_pre_hooks for part in self.modules())
        if isinstance(state_dict, Mapping) and not hooked:
            _compare(self, _unstacked(self, state_dict), strict, assign)
        return super().load_state_dict(state_dict, strict, assign)


def _unstacked(module: torch.nn.Module, given: Mapping[str, object]) -> Mapping[str, object]:
    """The checkpoint after the conversions of parts that read more than one form of it."""
    for prefix, part in module.named_modules():
        if hasattr(part, "_unstacked"):
            given = part._unstacked(given, f"{prefix}." if prefix else "")
    return given


def _compare(module: torch.nn.Module, given: Mapping[str, object], strict: bool, assign: bool) -> None:
    own = module.state_dict(keep_vars=True)
    unfit = []
    for prefix, part in module.named_modules():
        if hasattr(part, "_named_as"):  # it loads more than one form
            prefix = f"{prefix}." if prefix else ""
            unfit += part._refused(given, prefix, assign)
            own = part._named_as(own, given, prefix)
    missing = [key for key in own if key not in given and not is_extra_state(key)]
    unexpected = [key for key in given if key not in own and not is_extra_state(key)]
    for key, value in given.items():
        if key not in own or is_extra_state(key):
            continue
        if not is_tensor_like(value):
            unfit.append(f"type mismatch for {key}: the checkpoint's is {type(value).__name__}, wanted a tensor.")
        elif value.is_complex() and not own[key].is_complex():
            found = f"{value.dtype}, wanted real numbers as in {own[key].dtype}"
            unfit.append(f"type mismatch for {key}: the checkpoint's is {found}.")
        elif value.shape != own[key].shape:
            got, wanted = tuple(value.shape), tuple(own[key].shape)
            unfit.append(f"size mismatch for {key}: the checkpoint's is {got}, wanted {wanted}.")
    wrong = []
    if strict and missing:
        wrong.append(f"Missing key(s) in state_dict: {', '.join(missing)}.")
    if strict and unexpected:
        wrong.append(f"Unexpected key(s) in state_dict: {', '.join(unexpected)}.")
    wrong += unfit
    if wrong:
        name = type(module).__name__
        raise RuntimeError(f"Error(s) in loading state_dict for {name}, nothing was loaded:\n\t" + "\n\t".join(wrong))
    for prefix, part in module.named_modules():
        check = getattr(part, "check_extra_state", None)
        if check is not None:
            check(given.get(f"{prefix}._extra_state" if prefix else "_extra_state"))
