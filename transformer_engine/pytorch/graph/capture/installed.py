"""A captured callable in its module's place, and what says that the module has other tensors than its graphs read.
Moves nothing and refuses nothing itself: the next call does."""

from collections.abc import Callable
from functools import partial

import torch

from transformer_engine.pytorch.graph.capture.own_call import has_own_call, replaying
from transformer_engine.pytorch.graph.replay.replay import Graphed

_METHODS = ("forward", "backward_dw", "need_backward_dw", "drop_backward_dw", "reset")


def _address(t: torch.Tensor) -> int:
    try:
        return t.data_ptr()
    except (RuntimeError, ValueError):  # a wrapper, whose values lie in other tensors
        return 0


def _tensors(module: torch.nn.Module) -> dict[str, tuple[int, int]]:
    return {name: (id(t), _address(t)) for name, t in (*module.named_parameters(), *module.named_buffers())}


def _loaded(graphed: Graphed, look: Callable[[str], None], *_: object) -> None:
    """A hook. It holds `graphed`, which says why the module can be neither copied nor pickled."""
    look("load_state_dict(assign=True)")


def installed(module: object, graphed: Graphed) -> object:
    """The module with its forward replaced, and a __call__ of its class's own left out, which is captured with it; of a
    function, the captured callable itself. Where `.to()` and the like or
    load_state_dict(assign=True) give it other tensors, the callable is unfit from then on."""
    if not isinstance(module, torch.nn.Module):
        return graphed
    own = vars(module)
    before = {name: own[name] for name in (*_METHODS, "_apply") if name in own}
    convert: Callable = module._apply
    known, held = _tensors(module), [*module.parameters(), *module.buffers()]  # held: no other one gets its id

    def look(what: str) -> None:
        now = _tensors(module)
        if graphed.fitness.unfit is None and any(now.get(name) != tensor for name, tensor in known.items()):
            graphed.fitness.unfit = (
                f"{what} gave its module other tensors than those that it was captured with, which the graphs would go "
                "on reading; reset() it and capture again."
            )

    def _apply(*args, **kwargs):
        try:
            return convert(*args, **kwargs)
        finally:
            look("a conversion or a move (.to(), .cuda(), .half(), ...)")

    class_back = replaying(module) if has_own_call(module) else None

    def restore() -> None:
        if class_back is not None:
            class_back()
        loading.remove()
        held.clear()
        for name in (*_METHODS, "_apply"):
            if name in before:
                setattr(module, name, before[name])
            else:
                delattr(module, name)

    loading = module.register_load_state_dict_post_hook(partial(_loaded, graphed, look))
    graphed.fitness.on_reset = restore
    module.forward = graphed
    module._apply = _apply
    for name in _METHODS[1:]:
        setattr(module, name, getattr(graphed, name))
    return module
