"""make_graphed_callables: checks its arguments (capture/arguments.py), makes a plan and captures it.

- The signature is that of the public API.
- The arguments of a call of a captured callable are checked at the call (replay/signature.py).
"""

from collections.abc import Callable, Sequence
from numbers import Integral

import torch

from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.graph.capture.arguments import (
    check_bools,
    check_functions,
    check_modules,
    check_pool,
    common_device,
    make_quantizations,
    make_schedule,
    merge_deprecated,
    normalize_hooks,
    normalize_sample_args,
    normalize_sample_kwargs,
)
from transformer_engine.pytorch.graph.capture.capture import Capture
from transformer_engine.pytorch.graph.capture.module_patch import patch_module
from transformer_engine.pytorch.graph.capture.plan import CapturePlan, Hooks
from transformer_engine.pytorch.graph.describe import OP, callable_name, short_repr
from transformer_engine.pytorch.graph.observers import weight_waits
from transformer_engine.pytorch.graph.recorded.main_grads import fused_weights
from transformer_engine.pytorch.graph.recorded.quantization import WeightFlag
from transformer_engine.pytorch.graph.replay.signature import Signature


@check_keywords()
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
    """Captures modules as CUDA graphs, forward and backward. Results and gradients keep their bits; a call costs the
    host about as much as one launch. On a CPU checks and static tensors are the same, and a replay runs eager code.

    modules: one module or function, or a tuple; plain torch modules too. Without `_order` each module is returned with
      its forward replaced, and its reset() restores it. It is called as before, with tensors of the captured shapes,
      strides and dtypes; class Graphed describes the call.
    sample_args, sample_kwargs: the tuple of tensors, and a dict, for a call of the module; a tuple of them for several
      modules. The tensors become static inputs, so their values are overwritten. Other values in a dict are part of the
      graph, and each call has to pass equal ones; a keyword that was not captured may be passed as None.
    num_warmup_iters: eager runs before the captures, on a side stream, in the order of the schedule.
    allow_unused_input: inputs and parameters that require a gradient may get none.
    enabled, calibrating, recipe, amax_reduction_group: arguments of autocast around each module (`enabled` and `recipe`
      may be tuples with one entry for each); cache_quantized_params: the argument is_first_microbatch of each call
      decides whether weights are quantized again. The fp8_* names are deprecated.
    _order: the schedule of a pipeline. +c is the forward of chunk c, -c its backward, -c-0.5 the weight gradients that
      the latest -c delayed (delay_wgrad_compute); chunks count from 1 and have _num_layers_per_chunk modules, or none.
      sample_args has an entry for every chunk, microbatch and layer, in this order of nesting; the result is a tuple of
      callables, one for each. Call them in this order. _reuse_graph_input_output_buffers: microbatches that are not in
      flight together share static memory.
    pool: a graph memory pool to share (delayed weight gradients without entries in an order have one of their own).
      retain_graph_in_backward: a backward may be replayed again, with shared memory until the next call.
    clone_param_grads_on_return: False returns the static gradients of parameters, valid until the next replay.
    pre_warmup_hook, post_warmup_hook: called around the whole warm-up, on its stream. capture_time_hooks: for each
      module {"forward_pre_hooks" | "forward_hooks" | "backward_pre_hooks" | "backward_hooks": {id: fn(module)}}, called
      around each of its warm-up runs and captures, outside of them; they return None.
    A module in another mode, train or eval, than the captured one runs without its graph, with a warning that counts.
    Errors: ValueError or RuntimeError that names the argument, before anything is changed; an exception inside warm-up
      or capture leaves modules, random states, gradients and memory as they were.
    Saves: the static inputs and the pool of the graphs.
    """
    enabled, calibrating, recipe, group, caching = merge_deprecated(
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
        raise RuntimeError(f"{OP}: called inside a capture; captures cannot be nested, capture one after the other.")
    if torch.is_autocast_cache_enabled() and (torch.is_autocast_enabled("cuda") or torch.is_autocast_enabled("cpu")):
        raise RuntimeError(
            f"{OP}: called under torch.autocast with its cache of cast weights: a graph would read the cached casts "
            "after the weights have changed; use torch.autocast(..., cache_enabled=False)."
        )
    if isinstance(num_warmup_iters, bool) or not isinstance(num_warmup_iters, Integral) or num_warmup_iters < 0:
        raise ValueError(f"{OP}: argument 'num_warmup_iters' is {short_repr(num_warmup_iters)}, wanted 0 or more.")
    check_bools(
        allow_unused_input=allow_unused_input,
        calibrating=False if calibrating is None else calibrating,
        cache_quantized_params=False if caching is None else caching,
        retain_graph_in_backward=retain_graph_in_backward,
        _reuse_graph_input_output_buffers=_reuse_graph_input_output_buffers,
        clone_param_grads_on_return=clone_param_grads_on_return,
    )
    check_functions(pre_warmup_hook=pre_warmup_hook, post_warmup_hook=post_warmup_hook)
    check_pool(pool)
    single = not isinstance(modules, tuple | list)
    modules = [modules] if single else list(modules)
    check_modules(modules)
    schedule, delays_wgrad = make_schedule(modules, _order, _num_layers_per_chunk, _reuse_graph_input_output_buffers)
    one = single and _order is None
    args = normalize_sample_args(sample_args, schedule.samples, one)
    kwargs = normalize_sample_kwargs(sample_kwargs, schedule.samples, one)
    owner = {step.sample: step.module for step in schedule.steps}
    signatures = [
        Signature(f"graphed {callable_name(modules[owner[i]], owner[i])}", args[i], kwargs[i])
        for i in range(schedule.samples)
    ]
    device = common_device(signatures, modules)
    weight_flag = WeightFlag(device) if caching else None
    quantizations = make_quantizations(len(modules), enabled, calibrating, recipe, group, weight_flag)
    if any(q.used for q in quantizations) or any(map(fused_weights, modules)):
        num_warmup_iters = max(num_warmup_iters, 1)  # makes scales, cached weights and dummy gradients
    plan = CapturePlan(
        modules=modules,
        signatures=signatures,
        schedule=schedule,
        device=device,
        warmup_iterations=num_warmup_iters,
        hooks=normalize_hooks(capture_time_hooks, len(modules)),
        quantizations=quantizations,
        weight_flag=weight_flag,
        allow_unused_input=allow_unused_input,
        retain_graph=retain_graph_in_backward,
        reuse_buffers=_reuse_graph_input_output_buffers,
        clone_parameter_grads=clone_param_grads_on_return,
        pool=pool,
        pre_warmup_hook=pre_warmup_hook,
        post_warmup_hook=post_warmup_hook,
        delays_wgrad=delays_wgrad,
    )
    for wait in weight_waits([p for module in plan.torch_modules() for p in module.parameters()]):
        wait()
    graphed = Capture(plan, list(get_all_rng_states().values())).run()
    for one in graphed if weight_flag is not None else ():
        weight_flag.record(one.record.cached_weights)
    if _order is not None:
        return tuple(graphed)
    replaced = tuple(patch_module(module, g) for module, g in zip(modules, graphed))
    return replaced[0] if single else replaced
