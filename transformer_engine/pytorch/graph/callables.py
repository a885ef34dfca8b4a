"""make_graphed_callables: checks everything it is given, then has it captured. Copies the signature of the API."""

import warnings
from collections.abc import Callable, Mapping, Sequence
from numbers import Integral

import torch
import torch.distributed as dist

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch._keywords import tells_keywords
from transformer_engine.pytorch.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.graph.capture import Capture, Hooks, Plan, name_of
from transformer_engine.pytorch.graph.capture_quantization import Quantization, WeightFlag, our_modules
from transformer_engine.pytorch.graph.describe import OP, shown
from transformer_engine.pytorch.graph.installed import installed
from transformer_engine.pytorch.graph.order import pipeline_schedule, plain_schedule
from transformer_engine.pytorch.graph.own_call import has_own_call
from transformer_engine.pytorch.graph.replay import Graphed
from transformer_engine.pytorch.graph.replay_arguments import Signature
from transformer_engine.pytorch.graph.untouched import fused_weights

HOOK_KEYS = ("forward_pre_hooks", "forward_hooks", "backward_pre_hooks", "backward_hooks")


def _renamed(old: dict[str, object], new: dict[str, object]) -> list[object]:
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


def _check_switches(**switches: object) -> None:
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise ValueError(f"{OP}: argument '{name}' is {shown(value)}, wanted True or False.")


def _check_modules(modules: Sequence[object]) -> None:
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


def _samples(sample_args: object, count: int, single: bool) -> list[tuple]:
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


def _sample_kwargs(sample_kwargs: object, count: int, single: bool) -> list[Mapping[str, object]]:
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


def _hooks(capture_time_hooks: object, count: int) -> list[Hooks]:
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


def _device(signatures: Sequence[Signature], modules: Sequence[object]) -> torch.device:
    """The one device of all tensors."""
    found = {t.device for signature in signatures for t in signature.tensors()}
    found |= {p.device for m in modules if isinstance(m, torch.nn.Module) for p in (*m.parameters(), *m.buffers())}
    if len(found) > 1:
        raise ValueError(
            f"{OP}: 'sample_args', 'sample_kwargs' and the modules are on {sorted(map(str, found))}; a graph runs on "
            "one device, move them there."
        )
    return found.pop() if found else torch.device("cpu")


def _quantizations(
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


@tells_keywords()
def make_graphed_callables(
    modules: Callable | tuple[Callable, ...],
    sample_args: tuple,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: dict | tuple[dict, ...] | None = None,
    fp8_enabled: bool | tuple[bool, ...] | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: object | None = None,
    fp8_group: object | None = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | tuple[bool, ...] | None = None,
    calibrating: bool | None = None,
    recipe: object | None = None,
    amax_reduction_group: object | None = None,
    cache_quantized_params: bool | None = None,
    _order: list[int | float] | None = None,
    _num_layers_per_chunk: int | list[int] | None = None,
    pool: object | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable[[], object] | None = None,
    post_warmup_hook: Callable[[], object] | None = None,
    capture_time_hooks: Sequence[Hooks | None] | None = None,
) -> Callable | tuple[Callable, ...]:
    """The modules as CUDA graphs, forward and backward: same results and gradients, bit for bit, at the host's cost of
    a launch. On a CPU the same checks and static tensors, with the eager work in place of graphs.

    modules: one, or a tuple; plain torch modules too. Without `_order` each comes back with its forward replaced; its
      reset() takes that back. A module is called as before, with tensors of the same form: replay.Graphed says more.
    sample_args, sample_kwargs: the tuple of tensors, and a dict, that a module is called with; a tuple of them for
      several. They become the static inputs, so their values are overwritten. What is no tensor in a dict is part of
      the graph, and checked at each call; a keyword that is not there may be passed as None.
    num_warmup_iters: eager runs before the captures, on a side stream, in the schedule's order.
    allow_unused_input: inputs and parameters that want a gradient may go without.
    enabled, calibrating, recipe, amax_reduction_group: autocast's, around each module (`enabled` and `recipe` may be
      tuples, one for each); cache_quantized_params: each call says in is_first_microbatch whether quantized weights are
      made anew. The fp8_* names are the older ones.
    _order: a pipeline's schedule. +c is chunk c's forward, -c its backward, -c-0.5 the weight gradients that the latest
      -c left (delay_wgrad_compute); chunks from 1, of _num_layers_per_chunk modules, or of none. sample_args has an
      entry for every chunk, microbatch and layer, in this order of nesting, and what comes back is a tuple of
      callables, one for each. Call them in this order. _reuse_graph_input_output_buffers: microbatches that do not
      overlap share static memory.
    pool: a graph memory pool to share (delayed weight gradients without entries in an order have one of their own).
      retain_graph_in_backward: a backward may be replayed again, with shared memory until the next call.
    clone_param_grads_on_return: False hands out the static gradients of parameters, valid until the next replay.
    pre_warmup_hook, post_warmup_hook: called around the whole warm-up, on its stream. capture_time_hooks: for each
      module {"forward_pre_hooks" | "forward_hooks" | "backward_pre_hooks" | "backward_hooks": {id: fn(module)}}, called
      around each of its warm-up passes and captures, outside of them; they return None.
    A module in another mode, train or eval, than the captured one runs without its graph, with a warning that counts.
    Errors: ValueError or RuntimeError that names the argument, before anything is changed; an exception inside warm-up
      or capture leaves modules, random states, gradients and memory as they were.
    Saves: the static inputs and the graphs' pool.
    """
    enabled, calibrating, recipe, group, caching = _renamed(
        {
            "fp8_enabled": fp8_enabled,
            "fp8_calibrating": fp8_calibrating,
            "fp8_recipe": fp8_recipe,
            "fp8_group": fp8_group,
            "fp8_weight_caching": fp8_weight_caching,
        },
        {
            "enabled": enabled,
            "calibrating": calibrating,
            "recipe": recipe,
            "amax_reduction_group": amax_reduction_group,
            "cache_quantized_params": cache_quantized_params,
        },
    )
    if is_graph_capturing() or stream_captures():
        raise RuntimeError(f"{OP}: called inside a capture; capture one after the other.")
    if torch.is_autocast_cache_enabled() and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        raise RuntimeError(
            f"{OP}: called under torch.autocast with its cache of cast weights, which a graph would go on reading when "
            "the weights have changed; use torch.autocast(..., cache_enabled=False)."
        )
    if isinstance(num_warmup_iters, bool) or not isinstance(num_warmup_iters, Integral) or num_warmup_iters < 0:
        raise ValueError(f"{OP}: argument 'num_warmup_iters' is {shown(num_warmup_iters)}, wanted 0 or more.")
    _check_switches(
        allow_unused_input=allow_unused_input,
        calibrating=False if calibrating is None else calibrating,
        cache_quantized_params=False if caching is None else caching,
        retain_graph_in_backward=retain_graph_in_backward,
        _reuse_graph_input_output_buffers=_reuse_graph_input_output_buffers,
        clone_param_grads_on_return=clone_param_grads_on_return,
    )
    for name, hook in (("pre_warmup_hook", pre_warmup_hook), ("post_warmup_hook", post_warmup_hook)):
        if hook is not None and not callable(hook):
            raise ValueError(f"{OP}: argument '{name}' is {shown(hook)}, wanted a function without arguments, or None.")
    if pool is not None and not (isinstance(pool, tuple) and [type(part) for part in pool] == [int, int]):
        raise ValueError(
            f"{OP}: argument 'pool' is {shown(pool)}, wanted what torch.cuda.graph_pool_handle() or a graph's pool() "
            "returns."
        )
    single = not isinstance(modules, tuple | list)
    modules = [modules] if single else list(modules)
    _check_modules(modules)
    training = any(module.training for module in modules if isinstance(module, torch.nn.Module))
    # Without gradients nothing is left to delay, nor says a backward when a buffer is free.
    training = training and torch.is_grad_enabled()
    delays = [training and any(part.need_backward_dw() for part in our_modules(module)) for module in modules]
    if _order is None:
        if _num_layers_per_chunk is not None:
            raise ValueError(f"{OP}: argument '_num_layers_per_chunk' is given without '_order', which has the chunks.")
        repeated = len({id(module) for module in modules if isinstance(module, torch.nn.Module)})
        if repeated != sum(isinstance(module, torch.nn.Module) for module in modules):
            raise ValueError(f"{OP}: argument 'modules' has a module twice; its passes need '_order'.")
        schedule = plain_schedule(len(modules))
    else:
        schedule = pipeline_schedule(_order, _num_layers_per_chunk, len(modules), delays)
    if _reuse_graph_input_output_buffers and (_order is None or not training):
        raise ValueError(
            f"{OP}: argument '_reuse_graph_input_output_buffers' is True, which needs '_order' and modules in train "
            "mode, with gradients: without backward passes nothing says when a buffer is free."
        )
    one = single and _order is None
    args = _samples(sample_args, schedule.samples, one)
    kwargs = _sample_kwargs(sample_kwargs, schedule.samples, one)
    owner = {step.sample: step.module for step in schedule.steps}
    signatures = [
        Signature(f"graphed {name_of(modules[owner[i]], owner[i])}", args[i], kwargs[i])
        for i in range(schedule.samples)
    ]
    device = _device(signatures, modules)
    flag = WeightFlag(device) if caching else None
    quantizations = _quantizations(len(modules), enabled, calibrating, recipe, group, flag)
    if any(q.used for q in quantizations) or any(map(fused_weights, modules)):
        num_warmup_iters = max(num_warmup_iters, 1)  # scales, kept weights and dummy gradients: not made in a capture
    plan = Plan(
        modules=modules,
        signatures=signatures,
        schedule=schedule,
        device=device,
        warmup_iterations=num_warmup_iters,
        hooks=_hooks(capture_time_hooks, len(modules)),
        quantizations=quantizations,
        allow_unused_input=allow_unused_input,
        retain=retain_graph_in_backward,
        reuse=_reuse_graph_input_output_buffers,
        clone_parameter_grads=clone_param_grads_on_return,
        pool=pool,
        before_warmup=pre_warmup_hook,
        after_warmup=post_warmup_hook,
        delays=delays,
    )
    graphed = Capture(plan, list(get_all_rng_states().values())).run()
    for i, one_graphed in enumerate(graphed):
        one_graphed.flag = flag
        if flag is not None:
            flag.note(one_graphed.kept_weights)
        one_graphed.plan = quantizations[owner[i]].plan
    if _order is not None:
        return tuple(graphed)
    replaced = tuple(installed(module, g) for module, g in zip(modules, graphed))
    return replaced[0] if single else replaced
