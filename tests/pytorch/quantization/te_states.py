# `_extra_state` as Transformer Engine writes it, made by hand: its dict, with stand-ins for its recipe classes under
# their public names, as a pickle of any protocol or as torch.save's files, new and old.
import contextlib
import dataclasses
import enum
import io
import pickle

import torch

from transformer_engine.common import recipe as recipes

PROTOCOLS = (2, 3, 4, 5)
FORMS = (*(f"pickle {n}" for n in PROTOCOLS), "torch.save", "old torch.save")


@dataclasses.dataclass(frozen=True)
class _FormatHelper:
    max_fwd: float
    max_bwd: float


class Format(enum.Enum):
    E4M3 = _FormatHelper(max_fwd=448, max_bwd=448)
    E5M2 = _FormatHelper(max_fwd=57344, max_bwd=57344)
    HYBRID = _FormatHelper(max_fwd=E4M3.max_fwd, max_bwd=E5M2.max_bwd)
    UNKNOWN = _FormatHelper(max_fwd=3, max_bwd=5)


class FormatByName(enum.Enum):
    """As Python 3.11 pickles the members of an Enum."""

    E4M3 = (448, 448)
    HYBRID = (448, 57344)

    def __reduce_ex__(self, protocol):
        return getattr, (self.__class__, self._name_)


@dataclasses.dataclass
class QParams:
    power_2_scale: bool = False
    a_field_of_another_version: float = 0.5


@dataclasses.dataclass
class DelayedScaling:
    margin: int = 0
    fp8_format: object = Format.HYBRID
    amax_history_len: int = 1024
    amax_compute_algo: object = "max"
    scaling_factor_compute_algo: object = None
    a_field_of_another_version: tuple = (1, {"a": None})


@dataclasses.dataclass
class Float8CurrentScaling:
    fp8_format: object = Format.HYBRID
    fp8_quant_fwd_inp: QParams = dataclasses.field(default_factory=QParams)


@dataclasses.dataclass
class MXFP8BlockScaling:
    margin: int = 0


class ClientsScaling(DelayedScaling):
    """A framework's subclass, under its own name."""


ClientsScaling.__module__, ClientsScaling.__qualname__ = "a_framework.of_others", "ClientsScaling"
_STAND_INS = (_FormatHelper, Format, QParams, DelayedScaling, Float8CurrentScaling, MXFP8BlockScaling)
for stand_in in (*_STAND_INS, FormatByName):
    stand_in.__module__ = recipes.__name__
FormatByName.__qualname__ = "Format"


class _Pickler(pickle._Pickler):
    """Pickles a class by its own __module__ and __qualname__, without looking it up."""

    def save_global(self, obj, name=None):
        if isinstance(obj, type) and obj in (*_STAND_INS, FormatByName, ClientsScaling):
            if self.proto >= 4:
                self.save(obj.__module__)
                self.save(obj.__qualname__)
                self.write(pickle.STACK_GLOBAL)
            else:
                self.write(pickle.GLOBAL + f"{obj.__module__}\n{obj.__qualname__}\n".encode())
            self.memoize(obj)
        else:
            super().save_global(obj, name)

    dispatch = pickle._Pickler.dispatch | {type: save_global}


class _PickleModule:
    """The parts of a pickle module that torch.save uses."""

    Pickler = _Pickler

    @staticmethod
    def dump(obj, file, protocol=2):
        _Pickler(file, protocol).dump(obj)


def written(state, form):
    """The bytes of a state in one of FORMS."""
    file = io.BytesIO()
    with contextlib.suppress(UserWarning):
        if form.startswith("pickle"):
            _Pickler(file, int(form.split()[1])).dump(state)
        else:
            torch.save(state, file, pickle_module=_PickleModule, _use_new_zipfile_serialization=form == "torch.save")
    return file.getvalue()


def state_of(columns, length=4, recipe=None, seed=0, **changes):
    """The dict; columns: forward and backward. Changes of None leave a key out."""
    torch.manual_seed(seed)
    state = {"recipe": DelayedScaling() if recipe is None else recipe}
    for way, count in zip(("fwd", "bwd"), columns, strict=True):
        state[f"scale_{way}"] = torch.rand(count) + 0.5
        state[f"amax_history_{way}"] = torch.rand(length, count) + 0.5
        state[f"amax_history_{way}"][0] = 0.0
    state["extra_fp8_variables"] = {"fp8_checkpoint": True, "num_gemms": columns[1] // 2, "name": "x", "t": (1, [2.0])}
    return {key: value for key, value in (state | changes).items() if value is not None}


def as_tensor(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
