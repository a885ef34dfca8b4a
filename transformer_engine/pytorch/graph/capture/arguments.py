"""What make_graphed_callables is given: each argument is checked by itself, and brought into one form.
Captures nothing; the arguments of a replay are replay/arguments.py's."""

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.graph.capture.own_call import has_own_call
from transformer_engine.pytorch.graph.capture.plan import Hooks
from transformer_engine.pytorch.graph.describe import OP, name_of, shown
from transformer_engine.pytorch.graph.recorded.quantization import Quantization
from transformer_engine.pytorch.graph.recorded.weight_flag import WeightFlag
from transformer_engine.pytorch.graph.replay.arguments import Signature
from transformer_engine.pytorch.graph.replay.replay import Graphed

HOOK_KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def renamed(old: dict[str, object], new: dict[str, object]) -> list[object]:
    """The values of `new`, some of them given under their older names."""
    values = []
    for (old_name, old_value), (name, value) in zip(old.items(), new.items(), strict=True):
        if old_value is not None:
            if value is not None:
                raise ValueError(
                    f"{OP}: arguments '{name}' and '{old_name}' are both given, {shown(value)} and "
                    f"{shown(old_value)}; "
                    f"'{old_name}' is the older name of '{name}', pass that alone."
                )
            text = f"{OP}: argument '{old_name}' is deprecated, use '{name}'"
            warnings.warn(text, DeprecationWarning, stacklevel=4)  # the caller's line, behind tells_keywords
            value = old_value
        values.append(value)
    return values


def check_switches(**switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{OP}: argument '{name}' is {shown(value)}, wanted True or False.")


def check_modules(modules: Sequence[object]) -> None:
    if not modules:
        raise ValueError(f"{OP}: argument 'modules' is empty, wanted at least one module.")
    modes = set()
    for i, module in enumerate(modules):
        if not callable(module) or isinstance(module, type):
            what = f"the class {module.__name__}" if isinstance(module, type) else f"a {type(module).__name__}"
            raise ValueError(f"{OP}: argument 'modules' has {what} at {i}, wanted modules or functions.")
        if not isinstance(module, torch.nn.Module):
            continue
        no_forward = type(module).forward is torch.nn.Module.forward and "forward" not in vars(module)
        if no_forward and not has_own_call(module):  # a ModuleList
            raise ValueError(
                f"{OP}: argument 'modules' has a {type(module).__name__} at {i}, which has no forward; pass a tuple of "
                "its modules."
            )
        modes.add(module.training)
        if any(isinstance(vars(part).get("forward"), Graphed) for part in module.modules()):
            raise ValueError(
                f"{OP}: {name_of(module, i)} of 'modules' is captured already, or a module in it is; reset() it first."
            )
        hooked = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        if any(hooked):
            raise ValueError(
                f"{OP}: {name_of(module, i)} of 'modules' has hooks, which a graph would not call; remove them, and "
                "register them again afterwards, when they run around each replay."
            )
        for name, buffer in module.named_buffers():
            if buffer.requires_grad:
                raise ValueError(
                    f"{OP}: buffer '{name}' of {name_of(module, i)} requires a gradient, which only parameters and "
                    "inputs can get from a graph; make it a parameter, or detach it."
                )
        for part in module.modules():
            if part is not module and any(part is other for other in modules):
                raise ValueError(
                    f"{OP}: {name_of(module, i)} of 'modules' contains another one of them, a "
                    f"{type(part).__name__}, whose work would be in two graphs; pass either of the two."
                )
    if len(modes) > 1:
        raise ValueError(
            f"{OP}: argument 'modules' has modules in train and in eval mode; call .train() or .eval() on all of them."
        )


def samples_of(sample_args: object, count: int, single: bool) -> list[tuple]:
    if single:
        sample_args = (sample_args,)
    good = isinstance(sample_args, tuple | list) and all(isinstance(args, tuple | list) for args in sample_args)
    if not good:
        raise ValueError(
            f"{OP}: argument 'sample_args' is not "
            + ("a tuple of tensors; for one tensor pass (x,)." if single else "a tuple with a tuple for each callable.")
        )
    if len(sample_args) != count:
        raise ValueError(
            f"{OP}: argument 'sample_args' has {len(sample_args)} entries, wanted {count}: one for each callable, and "
            "with '_order' one for each of its microbatches too."
        )
    return [tuple(args) for args in sample_args]


def sample_kwargs_of(sample_kwargs: object, count: int, single: bool) -> list[Mapping[str, object]]:
    if sample_kwargs is None:
        return [{}] * count
    if isinstance(sample_kwargs, Mapping) and single:
        sample_kwargs = (sample_kwargs,)
    if not isinstance(sample_kwargs, tuple | list) or not all(isinstance(k, Mapping) for k in sample_kwargs):
        raise ValueError(
            f"{OP}: argument 'sample_kwargs' is {shown(sample_kwargs)}, wanted a dict for each of 'sample_args'."
        )
    if len(sample_kwargs) != count:
        raise ValueError(f"{OP}: argument 'sample_kwargs' has {len(sample_kwargs)} dicts, wanted {count}.")
    return list(sample_kwargs)


def hooks_of(capture_time_hooks: object, count: int) -> list[Hooks]:
    if capture_time_hooks is None:
        return [{}] * count
    if isinstance(capture_time_hooks, Mapping) and count == 1:
        capture_time_hooks = (capture_time_hooks,)
    if not isinstance(capture_time_hooks, tuple | list) or len(capture_time_hooks) != count:
        raise ValueError(f"{OP}: argument 'capture_time_hooks' wants one dict, or None, for each of {count} callables.")
    for i, hooks in enumerate(capture_time_hooks):
        if hooks is not None and not isinstance(hooks, Mapping):
            raise ValueError(
                f"{OP}: argument 'capture_time_hooks' has {shown(hooks)} for callable {i}, wanted a dict with keys of "
                f"{HOOK_KEYS}, or None."
            )
        for key, functions in (hooks or {}).items():
            if key not in HOOK_KEYS:
                raise ValueError(
                    f"{OP}: argument 'capture_time_hooks' has the key {shown(key)} for callable {i}, wanted one of "
                    f"{HOOK_KEYS}."
                )
            if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
                raise ValueError(
                    f"{OP}: argument 'capture_time_hooks' has {shown(functions)} for {key!r} of callable {i}, wanted a "
                    "dict of functions."
                )
    return [hooks or {} for hooks in capture_time_hooks]


def device_of(signatures: Sequence[Signature], modules: Sequence[object]) -> torch.device:
    """The one device of all tensors."""
    found = {t.device for signature in signatures for t in signature.tensors()}
    found |= {p.device for m in modules if isinstance(m, torch.nn.Module) for p in (*m.parameters(), *m.buffers())}
    if len(found) > 1:
        raise ValueError(
            f"{OP}: 'sample_args', 'sample_kwargs' and the modules are on {sorted(map(str, found))}; a graph runs on "
            "one device, move them there."
        )
    return found.pop() if found else torch.device("cpu")


def quantizations_of(
    count: int,
    enabled: bool | Sequence[bool] | None,
    calibrating: bool | None,
    recipe: object | None,
    group: object | None,
    flag: WeightFlag | None,
) -> list[Quantization]:
    switches = list(enabled) if isinstance(enabled, tuple | list) else [False if enabled is None else enabled] * count
    if len(switches) != count or not all(isinstance(e, bool) for e in switches):
        raise ValueError(
            f"{OP}: argument 'enabled' is {shown(enabled)}, wanted a bool, or one for each of {count} callables."
        )
    recipes = list(recipe) if isinstance(recipe, tuple | list) else [recipe] * count
    if len(recipes) != count or not all(r is None or isinstance(r, Recipe) for r in recipes):
        raise ValueError(
            f"{OP}: argument 'recipe' is {shown(recipe)}, wanted a recipe of transformer_engine.common.recipe, or a "
            f"tuple with one for each of {count} callables."
        )
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f"{OP}: argument 'amax_reduction_group' is {shown(group)}, wanted a process group of torch.distributed "
            "that this rank is in, or None for the default one."
        )
    return [Quantization((e, bool(calibrating), r, group), flag if e else None) for e, r in zip(switches, recipes)]
