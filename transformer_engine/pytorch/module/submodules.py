"""Calls of submodules: by the API of a submodule, for whatever class a client has put in its place, and with further
keywords if it is one of this library's own. It computes nothing."""

from collections.abc import Callable, Mapping

import torch

from transformer_engine.pytorch._internal.torch_private import has_any_global_hook

_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def only_watches(hook: Callable) -> Callable:
    """Marks a hook of this library that reads neither arguments nor results."""
    hook.only_watches = True
    return hook


def is_own(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """Whether a call of the module is exactly a call of `kind`'s forward: no subclass's forward, no hook, no other
    function in place of forward. Such a call takes keywords beyond the API."""
    return has_no_global_hook() and calls_forward(module, kind)


def has_no_global_hook() -> bool:
    return torch.compiler.is_compiling() or not has_any_global_hook()


def calls_forward(module: torch.nn.Module, kind: type[torch.nn.Module]) -> bool:
    """is_own() where there are no hooks of all modules."""
    of = type(module)
    if of is not kind:
        inherits = issubclass(of, kind) and of.forward is kind.forward and of.__call__ is kind.__call__
        if not inherits:
            return False
    own = module.__dict__
    if "forward" in own:
        return False
    hooks = own["_forward_hooks"] or own["_forward_pre_hooks"] or own["_backward_hooks"] or own["_backward_pre_hooks"]
    return not hooks or all(getattr(hook, "only_watches", False) for name in _HOOKS for hook in own[name].values())


def taken(
    op: str, name: str, module: torch.nn.Module, result: object, shape: torch.Size | int, norm: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The tensor that submodule `name` returned, with its bias added, and the norm's output.

    By the API a submodule returns a tensor, or (tensor, bias) if it leaves the bias to its caller; with `norm` the
    norm's output follows. shape: of the tensor, or the length of its rows.
    Errors: TypeError naming class and result for anything else."""
    several = isinstance(result, (tuple, list)) and len(result) > 0
    out, rest = (result[0], list(result[1:])) if several else (result, [])
    norm_output = rest.pop() if norm and rest else None
    bias = rest.pop() if rest else None
    width = shape if isinstance(shape, int) else shape[-1]
    fits = not rest and _fits(out, shape) and (not norm or isinstance(norm_output, torch.Tensor))
    if not fits or not (bias is None or (isinstance(bias, torch.Tensor) and bias.shape == (width,))):
        size = f"[..., {width}]" if isinstance(shape, int) else str(list(shape))
        suffix = ", followed by the norm's output" if norm else ""
        raise TypeError(
            f"{op}: submodule '{name}' is a {type(module).__name__} and returned {_described(result)}, wanted a tensor "
            f"{size} or (tensor, bias [{width}] or None){suffix}; return one of these."
        )
    return (out if bias is None else out + bias.to(out.dtype)), norm_output


def run_part(
    op: str,
    owner: torch.nn.Module,
    name: str,
    hidden: torch.Tensor,
    *inputs: object,
    shape: torch.Size | int,
    ours: Mapping[str, object] | None = None,
    norm: bool = False,
    **options: object,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor]:
    """Calls submodule `name`: its result and its norm's output as in `taken`, and the norm's input, which a module of
    this library (is_own) returns if it is given `ours`."""
    module, back = getattr(owner, name), hidden
    if ours is None:
        result = module(hidden, *inputs, **options)
    else:
        *result, back = module(hidden, *inputs, **options, **ours)
    return (*taken(op, name, module, result, shape, norm), back)


def _fits(value: object, shape: torch.Size | int) -> bool:
    if not isinstance(value, torch.Tensor):
        return False
    return value.shape[-1:] == (shape,) if isinstance(shape, int) else value.shape == shape


def _described(value: object) -> str:
    if isinstance(value, torch.Tensor):
        return f"{type(value).__name__} {list(value.shape)}"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(_described, value))})"
    return "None" if value is None else f"a {type(value).__name__}"
