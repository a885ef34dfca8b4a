"""make_graphed_callables: has everything checked that it is given (arguments.py), then has it captured. Copies
the signature of the API. What a call of a captured callable is given is checked at each call (replay/arguments.py)."""

from collections.abc import Callable, Sequence
from numbers import Integral

import torch

from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch._internal.keywords import tells_keywords
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.graph.capture.arguments import (
    check_modules,
    check_switches,
    device_of,
    hooks_of,
    quantizations_of,
    renamed,
    sample_kwargs_of,
    samples_of,
)
from transformer_engine.pytorch.graph.capture.capture import Capture
from transformer_engine.pytorch.graph.capture.installed import installed
from transformer_engine.pytorch.graph.capture.order import pipeline_schedule, plain_schedule
from transformer_engine.pytorch.graph.capture.plan import CapturePlan, Hooks
from transformer_engine.pytorch.graph.describe import OP, name_of, shown
from transformer_engine.pytorch.graph.recorded.main_grads import fused_weights
from transformer_engine.pytorch.graph.recorded.quantization import our_modules
from transformer_engine.pytorch.graph.recorded.weight_flag import WeightFlag
from transformer_engine.pytorch.graph.replay.arguments import Signature


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
    enabled, calibrating, recipe, group, caching = renamed(
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
    check_switches(
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
    check_modules(modules)
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
    args = samples_of(sample_args, schedule.samples, one)
    kwargs = sample_kwargs_of(sample_kwargs, schedule.samples, one)
    owner = {step.sample: step.module for step in schedule.steps}
    signatures = [
        Signature(f"graphed {name_of(modules[owner[i]], owner[i])}", args[i], kwargs[i])
        for i in range(schedule.samples)
    ]
    device = device_of(signatures, modules)
    flag = WeightFlag(device) if caching else None
    quantizations = quantizations_of(len(modules), enabled, calibrating, recipe, group, flag)
    if any(q.used for q in quantizations) or any(map(fused_weights, modules)):
        num_warmup_iters = max(num_warmup_iters, 1)  # scales, kept weights and dummy gradients: not made in a capture
    plan = CapturePlan(
        modules=modules,
        signatures=signatures,
        schedule=schedule,
        device=device,
        warmup_iterations=num_warmup_iters,
        hooks=hooks_of(capture_time_hooks, len(modules)),
        quantizations=quantizations,
        flag=flag,
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
    for one in graphed if flag is not None else ():
        flag.note(one.kept_weights)
    if _order is not None:
        return tuple(graphed)
    replaced = tuple(installed(module, g) for module, g in zip(modules, graphed))
    return replaced[0] if single else replaced
