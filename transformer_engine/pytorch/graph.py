"""CUDA-graph helpers: the names that clients import. Capturing is not here yet; torch's own graphs work around every
module."""

from collections.abc import Callable, Iterable

from transformer_engine.pytorch._absent import absent

_GRAPHS = "graphed callables are"
_TORCH = "use torch.cuda.make_graphed_callables"


@absent(_GRAPHS, _TORCH)
def make_graphed_callables(
    modules: Callable | tuple[Callable, ...],
    sample_args: tuple,
    num_warmup_iters: int = 3,
    allow_unused_input: bool = False,
    sample_kwargs: object | None = None,
    fp8_enabled: bool | None = None,
    fp8_calibrating: bool | None = None,
    fp8_recipe: object | None = None,
    fp8_group: object | None = None,
    fp8_weight_caching: bool | None = None,
    enabled: bool | None = None,
    calibrating: bool | None = None,
    recipe: object | None = None,
    amax_reduction_group: object | None = None,
    cache_quantized_params: bool | None = None,
    _order: list[int] | None = None,
    _num_layers_per_chunk: list[int] | None = None,
    pool: object | None = None,
    retain_graph_in_backward: bool = False,
    _reuse_graph_input_output_buffers: bool = False,
    clone_param_grads_on_return: bool = True,
    pre_warmup_hook: Callable | None = None,
    post_warmup_hook: Callable | None = None,
    capture_time_hooks: object | None = None,
) -> Callable | tuple[Callable, ...]:
    """Modules that run as CUDA graphs, forward and backward."""


@absent(_GRAPHS, _TORCH)
def set_capture_start() -> None:
    """Tells the modules that a capture begins."""


@absent(_GRAPHS, _TORCH)
def set_capture_end() -> None:
    """Tells the modules that a capture has ended."""


@absent("FP8 is")
def save_fp8_tensors(modules: Iterable[object], recipe: object | None) -> list | None:
    """The scales and histories of modules, as they are now."""


@absent("FP8 is")
def restore_fp8_tensors(modules: Iterable[object], fp8_tensors: list | None) -> None:
    """Puts back what save_fp8_tensors returned."""
