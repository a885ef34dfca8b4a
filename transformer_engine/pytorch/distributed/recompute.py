"""Activation recomputation: a function runs without saving the tensors of its backward, and runs again in the backward.
torch.utils.checkpoint saves the inputs and calls autograd; this file adds arguments of any form and all random
states."""

import weakref
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch.utils.checkpoint import checkpoint as torch_checkpoint
from torch.utils.checkpoint import noop_context_fn

from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing, stream_captures
from transformer_engine.pytorch._internal.recompute_phase import FirstRun, activation_recompute_forward, recompute_phase
from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.distributed.divided import divided_inputs
from transformer_engine.pytorch.distributed.rng import AsTheyCome, NoDraws, Snapshot


def is_fp8_activation_recompute_enabled() -> bool:
    """Whether this thread runs, inside an enabled te.autocast, a forward that is recomputed in the backward: either of
    its two runs."""
    return recompute_phase().enabled and recompute_phase().autocast.enabled()


class _Twice:
    """`function` with flat arguments and results, so that torch sees every tensor in them. The first call records the
    random states and the autocast; every later one is a recomputation with the same states."""

    def __init__(self, function: Callable, form: object, tracker: object | None, preserve: bool) -> None:
        self.function, self.form, self.tracker, self.preserve = function, form, tracker, preserve
        self.snapshot: Snapshot | NoDraws | AsTheyCome | None = None
        self.first_run = FirstRun()
        self.autocast = recompute_phase().autocast.note()
        self.result_form = None
        self.passed: dict[int, torch.Tensor] = {}
        self.outer: list[tuple[int, weakref.ref]] = []  # results of the first run that may come from outside
        # If its function raises, torch's non-reentrant way leaves saved-tensor hooks installed while the traceback
        # lives: the first run's error is stored, and raised outside of torch's code.
        self.reentrant = True
        self.error: BaseException | None = None

    def __call__(self, *leaves: object) -> tuple:
        if self.snapshot is not None:
            self.first_run.rewind()
            recompute_phase_context = activation_recompute_forward(True, True, first_run=self.first_run)
            with recompute_phase_context, self.snapshot.replayed(), self.autocast():
                results = self._call(leaves)
            self._refuse_outer(results)
        else:
            if not self.preserve:
                self.snapshot, guard = AsTheyCome(), nullcontext()
            elif stream_captures():
                self.snapshot = NoDraws()
                guard = self.snapshot.replayed()
            else:
                self.snapshot = Snapshot((leaf for leaf in leaves if isinstance(leaf, torch.Tensor)), self.tracker)
                guard = nullcontext()
            try:
                with activation_recompute_forward(True, False, first_run=self.first_run), guard:
                    results = self._call(leaves)
            except BaseException as error:
                if self.reentrant:
                    raise
                self.error = error
                return ()
            self._pass_by(leaves, results)
        return tuple(None if i in self.passed else result for i, result in enumerate(results))

    def _call(self, leaves: tuple) -> list:
        args, kwargs = pytree.tree_unflatten(leaves, self.form)
        results, self.result_form = pytree.tree_flatten(self.function(*args, **kwargs))
        return results

    def _pass_by(self, leaves: tuple, results: list) -> None:
        """Handles results of the reentrant way's first run that come from outside. Such a run has no graph, so a result
        that requires a gradient and is not an input comes from outside, like a parameter (the bias of return_bias), and
        has a history of its own, which torch would overwrite with the checkpoint's: its backward would call itself
        without end. A view that was made without gradients has no history: it gets the checkpoint's, on an alias,
        because it may come from outside too. A frozen parameter would become a result of the checkpoint forever."""
        inputs = {id(leaf) for leaf in leaves}
        if torch.is_grad_enabled():
            return
        for i, result in enumerate(results):
            if not isinstance(result, torch.Tensor) or id(result) in inputs:
                continue
            if not result.requires_grad:
                if isinstance(result, torch.nn.Parameter):
                    self.passed[i] = result
                else:
                    self.outer.append((i, weakref.ref(result)))
            elif result.grad_fn is None and result._is_view():
                results[i] = result.view_as(result)
            else:
                self.passed[i] = result

    def _refuse_outer(self, results: list) -> None:
        """Refuses a result that required no gradient and is the same tensor in both runs, so it comes from outside.
        torch has made it a result of the checkpoint, whose backward would call itself without end."""
        for i, first in self.outer:
            if i < len(results) and first() is results[i] and results[i].requires_grad:
                raise ValueError(
                    f"checkpoint: result {i} of the function is a {list(results[i].shape)} tensor from outside of it, "
                    "neither an argument nor a parameter (a buffer, a constant), which use_reentrant=True cannot "
                    "return; return a clone() of it, or pass use_reentrant=False."
                )

    def assemble(self, results: tuple) -> object:
        """The function's result in its original form, or its error."""
        if self.error is not None:
            try:
                raise self.error
            finally:
                self.error = None
        return pytree.tree_unflatten([self.passed.get(i, result) for i, result in enumerate(results)], self.result_form)


def _refuse_combinations(use_reentrant: bool, **only_without: tuple[object, object]) -> None:
    if not isinstance(use_reentrant, bool):
        raise ValueError(f"checkpoint: argument 'use_reentrant' is {use_reentrant!r}, wanted True or False.")
    for name, (value, default) in only_without.items():
        if use_reentrant and value is not default and value != default:
            raise ValueError(
                f"checkpoint: argument '{name}' is {value!r} together with use_reentrant=True, which does not support "
                "it; pass use_reentrant=False."
            )


def checkpoint(
    function: Callable,
    *args: object,
    use_reentrant: bool = True,
    distribute_saved_activations: bool = False,
    tp_group: object | None = None,
    get_rng_state_tracker: Callable | None = None,
    context_fn: Callable | None = None,
    determinism_check: str = "default",
    debug: bool = False,
    preserve_rng_state: bool = True,
    **kwargs: object,
) -> object:
    """function(*args, **kwargs), saving its inputs alone; the backward runs it again. The bits equal those of a plain
    call, gradients, dropout and autocast included; but under torch.autocast the reentrant way casts a weight again for
    each use, and adds up the gradients of several uses in the weight's dtype.

    Tensors may be anywhere in args, kwargs and the result: in tuples, lists and dicts too.
    use_reentrant: torch's two ways. If no argument requires a gradient, the reentrant way would give the parameters
      none, so the other one is used. Backward through the reentrant one takes no `inputs`.
    get_rng_state_tracker: () -> a tracker whose states the function may draw from (CudaRNGStatesTracker or one with its
      get_states and set_states).
    context_fn, determinism_check, debug: torch's, without use_reentrant.
    distribute_saved_activations: the first tensor among the arguments, equal on all ranks of tp_group, is saved in
      parts, one on each rank, and gathered for the second run. Not under torch.compile.
    preserve_rng_state: False leaves the random states as they are at the second run, which draws other numbers then; it
      saves time if the function draws nothing.
    Random states: the CPU's, CUDA's on the inputs' devices and the current one, and the tracker's are set for the
      second run to their values of the first, and restored after it.
    In a CUDA graph's capture: the non-reentrant way is used, and the function may draw no random numbers.
    Errors: ValueError for arguments that exclude each other; NotImplementedError inside a CUDA graph's capture for a
      function that draws random numbers.
    """
    if not callable(function):
        raise TypeError(
            f"checkpoint: argument 'function' is a {type(function).__name__}, wanted a callable; its arguments follow "
            "it."
        )
    _refuse_combinations(
        use_reentrant,
        context_fn=(context_fn, None),
        determinism_check=(determinism_check, "default"),
        debug=(debug, False),
    )
    if torch.compiler.is_compiling():
        if distribute_saved_activations:
            raise NotImplementedError(
                "checkpoint: argument 'distribute_saved_activations' is True under torch.compile, where activations "
                "that are saved in parts are not available in this version; compile the function inside checkpoint."
            )
        options = {"preserve_rng_state": preserve_rng_state, "context_fn": context_fn}
        return _traced(function, args, kwargs, get_rng_state_tracker, options)
    if not torch.is_grad_enabled():
        return function(*args, **kwargs)
    if is_graph_capturing() or stream_captures():
        use_reentrant = False  # captures call torch.autograd.grad, which the reentrant way refuses
    leaves, form = pytree.tree_flatten((args, kwargs))
    tracker = None if get_rng_state_tracker is None else get_rng_state_tracker()
    twice = _Twice(function, form, tracker, preserve_rng_state)
    options = {"use_reentrant": use_reentrant, "preserve_rng_state": False}  # _Twice restores those states
    if not use_reentrant or not any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves):
        twice.reentrant = False
        options = {
            **options,
            "use_reentrant": False,
            "context_fn": noop_context_fn if context_fn is None else context_fn,
            "determinism_check": determinism_check,
            "debug": debug,
        }
    around = nullcontext()
    if distribute_saved_activations:
        around = divided_inputs(function, leaves, tp_group)
    with around:
        results = torch_checkpoint(twice, *leaves, **options)
    return twice.assemble(results)


def _traced(
    function: Callable, args: tuple, kwargs: dict, get_rng_state_tracker: Callable | None, options: dict[str, object]
) -> object:
    """Under torch.compile the compiler decides what is saved, and replays random numbers itself."""
    if get_rng_state_tracker is not None:
        raise NotImplementedError(
            "checkpoint: argument 'get_rng_state_tracker' is given under torch.compile, which cannot follow the states "
            "of a tracker; that is not available in this version. Compile the function inside checkpoint instead."
        )
    if options["context_fn"] is None:
        del options["context_fn"]
    return torch_checkpoint(function, *args, use_reentrant=False, **options, **kwargs)
