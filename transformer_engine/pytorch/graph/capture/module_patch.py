"""Replaces the forward of a module by a captured callable, and detects that the module got other tensors.

- Nothing is refused here; the next call refuses.
"""

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch.graph.capture.module_call import call_forward_only, overrides_call
from transformer_engine.pytorch.graph.replay.graphed import Graphed

_METHODS = ("forward", "backward_dw", "need_backward_dw", "drop_backward_dw", "reset")


def _address(t: torch.Tensor) -> int:
    try:
        return t.data_ptr()
    except (RuntimeError, ValueError):  # a wrapper subclass without memory of its own
        return 0


def _addresses(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(t), _address(t)) for name, t in (*module.named_parameters(), *module.named_buffers())}


def _on_load_state_dict(graphed: Graphed, check_tensors: Callable[[str], None], *_: object) -> None:
    """A load_state_dict hook. It holds `graphed`, whose error explains why the module cannot be copied or pickled."""
    check_tensors("load_state_dict(assign=True)")


def patch_module(module: object, graphed: Graphed) -> object:
    """Returns the module with `graphed` as its forward, or `graphed` itself for a function.

    - An overridden __call__ of the class is bypassed, since the graph contains it.
    - After `.to()` and similar methods, or load_state_dict(assign=True), that replace tensors, the callable is invalid.
    """
    if not isinstance(module, torch.nn.Module):
        return graphed
    own, validity = vars(module), graphed.record.validity
    before = {name: own[name] for name in (*_METHODS, "_apply") if name in own}
    convert: Callable = module._apply
    known, held = _addresses(module), [*module.parameters(), *module.buffers()]  # kept alive so that ids stay unique

    def check_tensors(what: str) -> None:
        now = _addresses(module)
        if validity.invalid is None and any(now.get(name) != tensor for name, tensor in known.items()):
            validity.invalid = (
                f"{what} gave its module other tensors, but the graphs would still read those of the capture; "
                "reset() it and capture again."
            )

    def _apply(*args, **kwargs):
        try:
            return convert(*args, **kwargs)
        finally:
            check_tensors("a conversion or a move (.to(), .cuda(), .half(), ...)")

    restore_class = call_forward_only(module) if overrides_call(module) else None

    def restore() -> None:
        if restore_class is not None:
            restore_class()
        loading.remove()
        held.clear()
        for name in (*_METHODS, "_apply"):
            if name in before:
                setattr(module, name, before[name])
            else:
                delattr(module, name)

    loading = module.register_load_state_dict_post_hook(partial(_on_load_state_dict, graphed, check_tensors))
    validity.on_reset = restore
    module.forward = graphed
    module._apply = _apply
    for name in _METHODS[1:]:
        setattr(module, name, getattr(graphed, name))
    return module
