"""`_extra_state` in Transformer Engine's form: a pickle of {recipe, extra_fp8_variables, scale_fwd, amax_history_fwd,
scale_bwd, amax_history_bwd}, or a file of torch.save of that without the recipe. It is read as plain data, never run.
GroupedLinear writes the pickle, because clients take its state apart; other modules write extra_state.py's bytes."""

from __future__ import annotations

import pickle

import torch

from transformer_engine.common.recipe import DelayedScaling, Format
from transformer_engine.pytorch.quantization.checkpoint import pickles, saved_files
from transformer_engine.pytorch.quantization.checkpoint.loaded import Foreign, Loaded, Unfit
from transformer_engine.pytorch.quantization.delayed import ScalingState
from transformer_engine.pytorch.quantization.recipes.products import BACKWARD_SLOTS, FORWARD_SLOTS

_RECIPES = "transformer_engine.common.recipe."
_MEMBER = frozenset({"builtins.getattr", "__builtin__.getattr"})  # Python 3.11 writes the member of an Enum by it
_SLOTS = {"fwd": FORWARD_SLOTS, "bwd": BACKWARD_SLOTS}


def pack(forward: ScalingState, backward: ScalingState, num_gemms: int) -> torch.Tensor:
    """uint8, on the CPU: for modules whose state clients take apart."""
    rule = forward.rule
    state = {
        "recipe": DelayedScaling(rule.margin, rule.fp8_format, rule.amax_history_len),
        "extra_fp8_variables": {"fp8_checkpoint": True, "num_gemms": num_gemms},
    }
    for way, scaling in (("fwd", forward), ("bwd", backward)):
        state[f"scale_{way}"] = scaling.scale.detach().cpu().clone()
        state[f"amax_history_{way}"] = scaling.amax_history.detach().cpu().clone()
    return torch.frombuffer(bytearray(pickle.dumps(state, protocol=4)), dtype=torch.uint8)


def unpack(data: bytes, columns: tuple[int, int]) -> tuple[Loaded, Loaded] | None:
    """(forward, backward) for histories with so many columns; None if it has no delayed scaling. Errors: Foreign for
    the state of other tensors, Unfit for data that are not such a state."""
    try:
        return _unpack(data, columns)
    except pickles.Unreadable as error:
        raise Unfit(
            f"has {len(data)} bytes that cannot be read safely (a pickle that {error}), wanted this version's, or "
            "Transformer Engine's pickle of tensors, numbers and a recipe"
        ) from None


def _may_call(name: str) -> bool:
    return name == f"{_RECIPES}Format" or name in _MEMBER


def _unpack(data: bytes, columns: tuple[int, int]) -> tuple[Loaded, Loaded] | None:
    found, names = saved_files.read(data, _may_call)
    if found is None:
        return None
    if type(found) is not dict:
        raise Unfit(f"is a pickle of a {type(found).__name__}, wanted Transformer Engine's dict of scales")
    recipe = found.get("recipe")
    _refuse_others(recipe, names)
    if not any(f"{part}_{way}" in found for part in ("scale", "amax_history") for way in _SLOTS):
        if type(recipe) is pickles.Record or "extra_fp8_variables" in found:
            return None
        raise Unfit("is a pickle of a dict without a recipe and without scales, wanted Transformer Engine's")
    rule = _rule_of(recipe, found.get("extra_fp8_variables"))
    loaded = []
    for way, wanted in zip(_SLOTS, columns, strict=True):
        scale, history = (saved_files.tensor_of(found.get(f"{part}_{way}")) for part in ("scale", "amax_history"))
        if scale is None or history is None or scale.dim() != 1 or history.dim() != 2 or not len(history):
            raise Unfit(f"lacks scale_{way} [{wanted}] and amax_history_{way} [length, {wanted}]")
        if history.shape[1] != len(scale):
            raise Unfit(f"has {len(scale)} scales in scale_{way}, and amax_history_{way} is {list(history.shape)}")
        if wanted:
            places = _places(way, len(scale), wanted)
            scale, history = _spread(scale, places, 1.0), _spread(history, places, 0.0)
            loaded.append(Loaded.checked(rule, scale, history))
    return tuple(loaded) or None


def _refuse_others(recipe: object, names: list[pickles.Name]) -> None:
    """A recipe may be a client's own class, and name its functions; any other name must be listed."""
    of_recipe = {id(recipe.name), *map(id, recipe.fields().values())} if type(recipe) is pickles.Record else set()
    for name in names:
        listed = name.startswith((_RECIPES, "torch.", "_codecs.")) or _may_call(name)
        listed = listed or name in pickles.PLAIN or name in saved_files.FROM_BYTES
        if not (listed or id(name) in of_recipe):
            raise pickles.Unreadable(f"names {name:.100}")


def _rule_of(recipe: object, extra: object) -> DelayedScaling:
    """The format and the margin that the scales were computed for."""
    fields = recipe.fields() if type(recipe) is pickles.Record else {}
    options = {}
    if "margin" in fields:
        if type(fields["margin"]) is not int:  # before it is printed: it may be a container that holds itself
            raise Unfit(f"holds a recipe whose margin is a {type(fields['margin']).__name__}")
        options["margin"] = fields["margin"]
    if "fp8_format" in fields:
        options["fp8_format"] = _format_of(fields["fp8_format"])
    elif type(extra) is dict and extra.get("fp8_max_bwd") == Format.E4M3.value.max_bwd:  # older states have no recipe
        options["fp8_format"] = Format.E4M3
    try:
        return DelayedScaling(**options)
    except ValueError as error:
        raise Unfit(f"holds an invalid recipe ({error})") from None


def _format_of(value: object) -> Format:
    """The member of an Enum: by a call of the class with its value, by getattr with its name, or by its own name."""
    name = None
    if type(value) is pickles.Name:
        name = value.rpartition(".")[2]
    elif type(value) is str:
        name = value
    elif type(value) is pickles.Record and value.name in _MEMBER and len(value.arguments) == 2:
        name = value.arguments[1]
    elif type(value) is pickles.Record and len(value.arguments) == 1:
        (ranges,) = value.arguments
        if type(ranges) is pickles.Record:
            ranges = ranges.arguments or (ranges.fields().get("max_fwd"), ranges.fields().get("max_bwd"))
        for known in Format:
            if type(ranges) is tuple and ranges == tuple(known.value):
                return known
        raise Foreign("was made for a format that this version does not support")
    if type(name) is not str or name not in Format.__members__:
        raise Foreign("was made for a format that this version does not support")
    return Format[name]


def _places(way: str, found: int, wanted: int) -> list[int | None]:
    """For each of the module's columns the column with its tensor. Columns after the last product's are padding; the
    first versions had none for a product's last tensor."""
    slots = _SLOTS[way]
    if found >= wanted:
        return list(range(wanted))
    if found == wanted // slots * (slots - 1):
        return [None if at % slots == slots - 1 else at - at // slots for at in range(wanted)]
    raise Foreign(f"has {found} columns in scale_{way}, wanted {wanted}, the module's")


def _spread(values: torch.Tensor, places: list[int | None], missing: float) -> torch.Tensor:
    columns = [values.new_full(values.shape[:-1], missing) if at is None else values[..., at] for at in places]
    return torch.stack(columns, -1)
