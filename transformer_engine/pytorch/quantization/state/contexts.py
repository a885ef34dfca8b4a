"""autocast and quantized_model_init: they set the state, and restore the former one at their end. Modules do the work;
a module refuses a recipe that is not supported when it first uses it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch._internal.keywords import check_keywords, hides_unknown, unknown_keyword
from transformer_engine.pytorch.quantization.delayed import Region
from transformer_engine.pytorch.quantization.recipes.formats import must_be_a_recipe
from transformer_engine.pytorch.quantization.state.autocast_state import current_state


def _deprecated(old: str, new: str) -> None:
    if not torch.compiler.is_compiling():  # Dynamo cannot follow a warning
        warnings.warn(f"{old} is deprecated, use {new}", DeprecationWarning, stacklevel=4)  # past check_keywords


def _must_be_flags(op: str, **flags: object) -> None:
    for name, value in flags.items():
        if value not in (True, False):
            raise ValueError(f"{op}: argument '{name}' is {value!r}, wanted True or False.")


class autocast:
    """Modules called inside compute in the recipe's format (get_default_recipe() if none is given).

    enabled=False: in high precision, also inside another autocast. calibrating: with enabled=False, modules compute in
    high precision and record the amaxes for the scales of delayed scaling. amax_reduction_group: the group over which
    those amaxes are reduced, once, when the outermost autocast ends; None: the default group, if there is one. _graph:
    for the owner of a captured graph, which updates scales itself.
    Contexts nest, and an instance may be entered again after it has been left. The state belongs to the thread, as
    torch.autocast's does: a new thread starts without it, a backward uses the state of the thread that calls it, and
    te.checkpoint's second run uses that of the first. A module that runs under two recipes inside one outermost
    autocast is refused if one of them is delayed scaling.
    Errors: ValueError for a wrong flag or recipe; RuntimeError if an instance is entered that has not been left.
    """

    @hides_unknown
    def __init__(
        self,
        enabled: bool = True,
        calibrating: bool = False,
        recipe: Recipe | None = None,
        amax_reduction_group: object | None = None,
        _graph: bool = False,
        **unknown: object,
    ) -> None:
        if unknown:
            raise unknown_keyword(autocast.__init__, unknown)
        if type(enabled) is not bool or type(calibrating) is not bool:
            _must_be_flags("autocast", enabled=enabled, calibrating=calibrating)
        if recipe is not None:
            must_be_a_recipe("autocast", recipe)
        self.enabled = bool(enabled)
        self.calibrating = bool(calibrating)
        self.recipe = recipe
        self.amax_reduction_group = amax_reduction_group
        self._graph = _graph
        self._before: tuple | None = None

    def __enter__(self) -> autocast:
        if self._before is not None:
            raise RuntimeError(
                "autocast: this instance has been entered and not left; make one for each block that runs at a time."
            )
        state = current_state()
        self._before = (
            state,
            (state.enabled, state.calibrating, state.recipe, state.group),
            (state.token, state.plan, state.region, state.capturing),
            state.resets,
        )
        if state.depth == 0:
            state.region = None if torch.compiler.is_compiling() else Region()
        state.depth += 1
        state.capturing = self._graph or (state.depth > 1 and state.capturing)  # the outer owner owns all inside
        state.set(self.enabled, self.calibrating, self.recipe, self.amax_reduction_group)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: object | None) -> None:
        state, settings, rest, resets = self._before
        region, graph = state.region, state.capturing
        self._before = None
        if state.resets != resets:
            return
        state.depth -= 1
        state.set(*settings)
        state.token, state.plan, state.region, state.capturing = rest
        if state.depth == 0 and region is not None and error is None:
            if region.waits():
                state.waiting.append(region)
            if not graph:
                region.update_forward()


@check_keywords()
def fp8_autocast(
    enabled: bool = True,
    calibrating: bool = False,
    fp8_recipe: Recipe | None = None,
    fp8_group: object | None = None,
    _graph: bool = False,
) -> autocast:
    """autocast under its older names."""
    _deprecated("fp8_autocast", "autocast")
    return autocast(enabled, calibrating, fp8_recipe, fp8_group, _graph)


@check_keywords()
@contextmanager
def quantized_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> Iterator[None]:
    """Modules built inside hold their products' weights in the recipe's format alone (QuantizedTensor), and run under
    recipes that quantize weights in the same way: a RuntimeError names both recipes otherwise.

    Under delayed scaling new values bring a scale that fits them: values of init functions and of operations that fill
    or draw (zero_, normal_), of load_state_dict, and all values before a training step has computed scales, or outside
    of training (eval()). Any other write is a step: it uses the scale that the recipe computed from the amaxes of
    earlier steps, which clips larger values once; the next scales cover them.
    preserve_high_precision_init_val: the initial values are kept on the CPU, for an optimizer's master weights:
    weight.get_high_precision_init_val(), then weight.clear_high_precision_init_val(). enabled=False: nothing changes.
    Errors: ValueError for a wrong flag or recipe."""
    _must_be_flags("quantized_model_init", enabled=enabled)
    if recipe is not None:
        must_be_a_recipe("quantized_model_init", recipe)
    state = current_state()
    before, resets = (state.parameters, state.parameters_recipe, state.preserve_high_precision), state.resets
    state.parameters = bool(enabled)
    state.parameters_recipe = recipe
    state.preserve_high_precision = preserve_high_precision_init_val
    try:
        yield
    finally:
        if state.resets == resets:
            state.parameters, state.parameters_recipe, state.preserve_high_precision = before


@check_keywords()
def fp8_model_init(
    enabled: bool = True, recipe: Recipe | None = None, preserve_high_precision_init_val: bool = False
) -> object:
    """quantized_model_init under its older name."""
    _deprecated("fp8_model_init", "quantized_model_init")
    return quantized_model_init(enabled, recipe, preserve_high_precision_init_val)
