"""Checks and normalizes the arguments of make_graphed_callables.

- Nothing is captured here; replay/signature.py checks the arguments of a replay.
"""

import warnings
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.graph.capture.module_call import overrides_call
from transformer_engine.pytorch.graph.capture.order import Schedule, pipeline_schedule, sequential_schedule
from transformer_engine.pytorch.graph.capture.plan import Hooks
from transformer_engine.pytorch.graph.describe import OP, callable_name, short_repr
from transformer_engine.pytorch.graph.recorded.quantization import Quantization, WeightFlag, our_modules
from transformer_engine.pytorch.graph.replay.graphed import Graphed
from transformer_engine.pytorch.graph.replay.signature import Signature

HOOK_KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def merge_deprecated(old: dict[str, object], new: dict[str, object]) -> list[object]:
    """The values of `new`; a value given under its deprecated name in `old` takes its place."""
    values = []
    for (old_name, old_value), (name, value) in zip(old.items(), new.items(), strict=True):
        if old_value is not None:
            if value is not None:
                raise ValueError(
                    f"{OP}: arguments '{name}' and '{old_name}' are both given, {short_repr(value)} and "
                    f"{short_repr(old_value)}; '{old_name}' is the deprecated name of '{name}', pass only '{name}'."
                )
            text = f"{OP}: argument '{old_name}' is deprecated, use '{name}'"
            warnings.warn(text, DeprecationWarning, stacklevel=4)  # the caller of check_keywords' wrapper
            value = old_value
        values.append(value)
    return values


def check_bools(**values: object) -> None:
    for name, value in values.items():
        if not isinstance(value, bool):
            raise ValueError(f"{OP}: argument '{name}' is {short_repr(value)}, wanted True or False.")


def check_functions(**functions: object) -> None:
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ValueError(
                f"{OP}: argument '{name}' is {short_repr(function)}, wanted a function without arguments, or None."
            )


def check_pool(pool: object | None) -> None:
    if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        raise ValueError(
            f"{OP}: argument 'pool' is {short_repr(pool)}, wanted the result of torch.cuda.graph_pool_handle() or of a "
            "graph's pool()."
        )


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
        if no_forward and not overrides_call(module):  # for example a ModuleList
            raise ValueError(
                f"{OP}: argument 'modules' has a {type(module).__name__} at {i}, which has no forward; pass a tuple of "
                "its modules."
            )
        modes.add(module.training)
        if any(isinstance(vars(part).get("forward"), Graphed) for part in module.modules()):
            raise ValueError(
                f"{OP}: {callable_name(module, i)} of 'modules' is captured already, or a module in it is; call its "
                "reset() first."
            )
        hooked = (module._forward_pre_hooks, module._forward_hooks, module._backward_pre_hooks, module._backward_hooks)
        if not all(getattr(hook, "rests_in_captures", False) for hooks in hooked for hook in hooks.values()):
            raise ValueError(
                f"{OP}: {callable_name(module, i)} of 'modules' has hooks, which a graph does not call; remove them, "
                "and register them after the capture: they then run around each replay."
            )
        for name, buffer in module.named_buffers():
            if buffer.requires_grad:
                raise ValueError(
                    f"{OP}: buffer '{name}' of {callable_name(module, i)} requires a gradient, but a graph has "
                    "gradients only for parameters and inputs; make it a parameter, or detach it."
                )
        for part in module.modules():
            if part is not module and any(part is other for other in modules):
                raise ValueError(
                    f"{OP}: {callable_name(module, i)} of 'modules' contains another entry, a {type(part).__name__}, "
                    "which would be in two graphs; pass one of the two."
                )
    if len(modes) > 1:
        raise ValueError(
            f"{OP}: argument 'modules' has modules in train and in eval mode; call .train() or .eval() on all of them."
        )


def make_schedule(
    modules: Sequence[object],
    order: Sequence[int | float] | None,
    layers_per_chunk: int | Sequence[int] | None,
    reuse_buffers: bool,
) -> tuple[Schedule, list[bool]]:
    """(the schedule, for each module whether it delays weight gradients)."""
    training = any(module.training for module in modules if isinstance(module, torch.nn.Module))
    # Without gradients no weight gradient is delayed, and no backward marks the end of a buffer's use.
    training = training and torch.is_grad_enabled()
    delays_wgrad = [training and any(part.need_backward_dw() for part in our_modules(module)) for module in modules]
    if order is None:
        if layers_per_chunk is not None:
            raise ValueError(
                f"{OP}: argument '_num_layers_per_chunk' is given without '_order'; pass '_order' too, or leave it out."
            )
        distinct = len({id(module) for module in modules if isinstance(module, torch.nn.Module)})
        if distinct != sum(isinstance(module, torch.nn.Module) for module in modules):
            raise ValueError(f"{OP}: argument 'modules' has a module twice; capture its microbatches with '_order'.")
        schedule = sequential_schedule(len(modules))
    else:
        schedule = pipeline_schedule(order, layers_per_chunk, len(modules), delays_wgrad)
    if reuse_buffers and (order is None or not training):
        raise ValueError(
            f"{OP}: argument '_reuse_graph_input_output_buffers' is True, but it needs '_order' and modules in train "
            "mode, with gradients: only a backward marks the end of a buffer's use."
        )
    return schedule, delays_wgrad


def normalize_sample_args(sample_args: object, count: int, single: bool) -> list[tuple]:
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
            "with '_order' one for each callable and microbatch."
        )
    return [tuple(args) for args in sample_args]


def normalize_sample_kwargs(sample_kwargs: object, count: int, single: bool) -> list[Mapping[str, object]]:
    if sample_kwargs is None:
        return [{}] * count
    if isinstance(sample_kwargs, Mapping) and single:
        sample_kwargs = (sample_kwargs,)
    if not isinstance(sample_kwargs, tuple | list) or not all(isinstance(k, Mapping) for k in sample_kwargs):
        raise ValueError(
            f"{OP}: argument 'sample_kwargs' is {short_repr(sample_kwargs)}, wanted a dict for each of 'sample_args'."
        )
    if len(sample_kwargs) != count:
        raise ValueError(f"{OP}: argument 'sample_kwargs' has {len(sample_kwargs)} dicts, wanted {count}.")
    return list(sample_kwargs)


def normalize_hooks(capture_time_hooks: object, count: int) -> list[Hooks]:
    if capture_time_hooks is None:
        return [{}] * count
    if isinstance(capture_time_hooks, Mapping) and count == 1:
        capture_time_hooks = (capture_time_hooks,)
    if not isinstance(capture_time_hooks, tuple | list) or len(capture_time_hooks) != count:
        raise ValueError(f"{OP}: argument 'capture_time_hooks': wanted a dict, or None, for each of {count} callables.")
    for i, hooks in enumerate(capture_time_hooks):
        if hooks is not None and not isinstance(hooks, Mapping):
            raise ValueError(
                f"{OP}: argument 'capture_time_hooks' has {short_repr(hooks)} for callable {i}, wanted a dict with "
                f"keys of {HOOK_KEYS}, or None."
            )
        for key, functions in (hooks or {}).items():
            if key not in HOOK_KEYS:
                raise ValueError(
                    f"{OP}: argument 'capture_time_hooks' has the key {short_repr(key)} for callable {i}, wanted one "
                    f"of {HOOK_KEYS}."
                )
            if not isinstance(functions, Mapping) or not all(map(callable, functions.values())):
                raise ValueError(
                    f"{OP}: argument 'capture_time_hooks' has {short_repr(functions)} for {key!r} of callable {i}, "
                    "wanted a dict of functions."
                )
    return [hooks or {} for hooks in capture_time_hooks]


def common_device(signatures: Sequence[Signature], modules: Sequence[object]) -> torch.device:
    """The one device of all tensors."""
    found = {t.device for signature in signatures for t in signature.tensors()}
    found |= {p.device for m in modules if isinstance(m, torch.nn.Module) for p in (*m.parameters(), *m.buffers())}
    if len(found) > 1:
        raise ValueError(
            f"{OP}: 'sample_args', 'sample_kwargs' and the modules are on {sorted(map(str, found))}; a graph runs on "
            "one device, move all of them to it."
        )
    return found.pop() if found else torch.device("cpu")


def make_quantizations(
    count: int,
    enabled: bool | Sequence[bool] | None,
    calibrating: bool | None,
    recipe: object | None,
    group: object | None,
    weight_flag: WeightFlag | None,
) -> list[Quantization]:
    enables = list(enabled) if isinstance(enabled, tuple | list) else [False if enabled is None else enabled] * count
    if len(enables) != count or not all(isinstance(e, bool) for e in enables):
        raise ValueError(
            f"{OP}: argument 'enabled' is {short_repr(enabled)}, wanted a bool, or one for each of {count} callables."
        )
    recipes = list(recipe) if isinstance(recipe, tuple | list) else [recipe] * count
    if len(recipes) != count or not all(r is None or isinstance(r, Recipe) for r in recipes):
        raise ValueError(
            f"{OP}: argument 'recipe' is {short_repr(recipe)}, wanted a recipe of transformer_engine.common.recipe, or "
            f"a tuple with one for each of {count} callables."
        )
    if group is not None and not (dist.is_available() and isinstance(group, dist.ProcessGroup)):
        raise ValueError(
            f"{OP}: argument 'amax_reduction_group' is {short_repr(group)}, wanted a process group of "
            "torch.distributed that includes this rank, or None for the default one."
        )
    return [
        Quantization((e, bool(calibrating), r, group), weight_flag if e else None) for e, r in zip(enables, recipes)
    ]
