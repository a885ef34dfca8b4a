"""FP8GlobalStateManager: the API by which clients read and set contexts and scales. It keeps no state itself.
Everything belongs to the calling thread; in a backward, to the thread that called the backward."""

from __future__ import annotations

from collections import deque

import torch

from transformer_engine.common.recipe import Recipe
from transformer_engine.pytorch.quantization.recipes import availability
from transformer_engine.pytorch.quantization.state.autocast_state import current_state
from transformer_engine.pytorch.utils import resolve_device


class QuantizationState:
    """The state of the innermost autocast as attributes; those for owners of graphs can be set."""

    @property
    def fp8_enabled(self) -> bool:
        return current_state().enabled

    @property
    def fp8_calibration(self) -> bool:
        return current_state().calibrating

    @property
    def fp8_recipe(self) -> Recipe | None:
        """The recipe of the innermost autocast; None if it was given none."""
        return current_state().recipe

    @property
    def fp8_distributed_group(self) -> object | None:
        return current_state().group

    @property
    def fp8_parameters(self) -> bool:
        return current_state().parameters

    @property
    def high_precision_init_val(self) -> bool:
        return current_state().preserve_high_precision

    @property
    def autocast_depth(self) -> int:
        return current_state().depth

    @property
    def skip_fp8_weight_update_tensor(self) -> torch.Tensor | None:
        return current_state().skip_weight_update

    @property
    def fp8_graph_capturing(self) -> bool:
        return current_state().in_capture()

    @fp8_graph_capturing.setter
    def fp8_graph_capturing(self, capturing: bool) -> None:
        current_state().capturing = capturing

    @property
    def is_first_fp8_module(self) -> bool:
        """Whether no module has been the first yet inside the outermost autocast; reading changes nothing."""
        region = current_state().region
        return region is not None and not (region.claimed or region.followed)

    @is_first_fp8_module.setter
    def is_first_fp8_module(self, first: bool) -> None:
        if current_state().region is not None:
            current_state().region.claimed = not first


class FP8GlobalStateManager:
    """The state of the innermost autocast, and the scales of delayed scaling."""

    quantization_state = QuantizationState()

    @classmethod
    def reset(cls) -> None:
        """As in a new process: no context, nothing waiting. Open contexts count as ended, and leaving them changes
        nothing; modules that ran inside get no new scales from them. Scales and histories stay in the modules."""
        current_state().reset()

    @classmethod
    def is_fp8_enabled(cls) -> bool:
        return current_state().enabled

    @classmethod
    def is_fp8_calibration(cls) -> bool:
        return current_state().calibrating

    @classmethod
    def with_fp8_parameters(cls) -> bool:
        """Whether modules built now get quantized weights."""
        return current_state().parameters

    @classmethod
    def with_high_precision_init_val(cls) -> bool:
        return current_state().preserve_high_precision

    @classmethod
    def fp8_graph_capturing(cls) -> bool:
        """Whether a graph is being captured: by its owner's flag (autocast's _graph) or by the stream."""
        return current_state().in_capture()

    @classmethod
    def is_first_fp8_module(cls) -> bool:
        """True once inside each outermost autocast, unless a module that ran has been the first already."""
        first = cls.quantization_state.is_first_fp8_module
        if first:
            cls.quantization_state.is_first_fp8_module = False
        return first

    @classmethod
    def get_fp8_recipe(cls) -> Recipe:
        return current_state().chosen_recipe()

    @classmethod
    def get_fp8_group(cls) -> object | None:
        return current_state().group

    @classmethod
    def get_fp8_autocast_state(cls) -> tuple:
        """(enabled, calibrating, recipe, group, capturing)."""
        return current_state().snapshot()[:5]

    @classmethod
    def set_fp8_autocast_state(cls, fp8_state: tuple) -> None:
        """Sets the state that get_fp8_autocast_state returned."""
        state = current_state()
        *settings, state.capturing = fp8_state
        state.set(*settings)

    @classmethod
    def is_fp8_available(cls) -> tuple[bool, str]:
        return availability.check_fp8_support()

    @classmethod
    def is_mxfp8_available(cls) -> tuple[bool, str]:
        return availability.check_mxfp8_support()

    @classmethod
    def is_fp8_block_scaling_available(cls) -> tuple[bool, str]:
        return availability.check_fp8_block_scaling_support()

    @classmethod
    def is_nvfp4_available(cls) -> tuple[bool, str]:
        return availability.check_nvfp4_support()

    @classmethod
    def set_skip_fp8_weight_update_tensor(cls, skip: bool | None) -> None:
        """A flag on the device, float32 [1], that a graph's kernels read: if it is not 0, a cached weight is not
        quantized again. It keeps its memory, so that a graph that was captured with it follows; calls outside of a
        capture read is_first_microbatch alone. None: there is no flag."""
        state = current_state()
        if skip is None:
            state.skip_weight_update = None
            return
        if state.skip_weight_update is None:
            state.skip_weight_update = torch.empty(1, dtype=torch.float32, device=resolve_device(None))
        state.skip_weight_update.fill_(float(skip))

    @classmethod
    def get_skip_fp8_weight_update_tensor(cls) -> torch.Tensor | None:
        return current_state().skip_weight_update

    @classmethod
    def reduce_and_update_fp8_tensors(cls, forward: bool = True) -> None:
        """Computes new scales from the amaxes of the current region's forward, or of the backward of the oldest region
        whose owner captured it in a graph. Eager regions do both without it."""
        state = current_state()
        if forward:
            if state.region is not None:
                state.region.update_forward()
        elif state.waiting:
            state.waiting.popleft().update_backward()

    @classmethod
    def add_fp8_tensors_to_global_buffer(cls, fp8_meta: dict) -> None:
        """Adds a module's scales and histories to the current region: for the replay of a graph, in which no module
        runs. Outside of autocast, and for recipes without state, nothing happens."""
        region = current_state().region
        if region is None:
            return
        for forward in (True, False):
            key = cls.get_meta_tensor_key(forward)
            if key in fp8_meta:
                region.by_hand = True
                region.add(fp8_meta[key], fp8_meta["fp8_group"], forward=forward)

    @classmethod
    def get_meta_tensor_key(cls, forward: bool = True) -> str:
        """The key of fp8_meta for the scales of a direction."""
        return "scaling_fwd" if forward else "scaling_bwd"

    @classmethod
    def copy_forward_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        """Keeps a copy of the forward scales for a forward that will be recomputed."""
        fp8_meta.setdefault("scales_for_recompute", deque()).append(fp8_meta["scaling_fwd"].used())

    @classmethod
    def get_old_fp8_meta_tensors_for_recompute(cls, fp8_meta: dict) -> None:
        """Sets the oldest kept scales, until restore_fp8_meta_tensors.

        Errors: RuntimeError if none are kept."""
        kept = fp8_meta.get("scales_for_recompute")
        if not kept:
            raise RuntimeError(
                "get_old_fp8_meta_tensors_for_recompute: no scales are kept; the first forward runs inside "
                "activation_recompute_forward(activation_recompute=True), or call "
                "copy_forward_fp8_meta_tensors_for_recompute in it."
            )
        state = fp8_meta["scaling_fwd"]
        fp8_meta["scales_before_recompute"] = state.scale.clone()
        state.scale.copy_(kept.popleft())
        state.changed()

    @staticmethod
    def restore_fp8_meta_tensors(fp8_meta: dict) -> None:
        """Restores the scales that get_old_fp8_meta_tensors_for_recompute replaced."""
        state = fp8_meta["scaling_fwd"]
        state.scale.copy_(fp8_meta.pop("scales_before_recompute"))
        state.changed()
