"""The settings of a quantizer: copied, compared, adopted from a recipe, stored in files. Nothing is quantized here."""

import copy
from collections.abc import Mapping
from typing import ClassVar

from transformer_engine.pytorch.constants import DType
from transformer_engine.pytorch.tensor.layout import DATA
from transformer_engine.pytorch.tensor.registry import QUANTIZERS, AnyQuantized


class Settings:
    """The part of a quantizer with its settings."""

    _configuration: ClassVar[dict[str, str]] = {}  # attribute -> the constructor's argument that sets it
    _in_files: ClassVar[bool] = False  # its settings are complete, and files store them
    _shared_by_copies: ClassVar[tuple[str, ...]] = ()  # attributes that a deepcopy shares

    def copy(self) -> "Settings":
        """Another one with the same settings and the same state tensors."""
        return copy.copy(self)

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_kept"}

    def __deepcopy__(self, memo: dict) -> "Settings":
        memo[id(self)] = result = object.__new__(type(self))
        for name, value in self.__getstate__().items():
            setattr(result, name, value if name in self._shared_by_copies else copy.deepcopy(value, memo))
        return result

    def _plain(self) -> dict[str, object]:
        """Settings as plain values, for files and comparisons."""
        usages = {f"{kind}_usage": getattr(self, f"{kind}_usage") for kind in DATA}
        settings = {name: getattr(self, name) for name in self._configuration}
        numbers = {name: int(value) if isinstance(value, DType) else value for name, value in settings.items()}
        return {"class": type(self).__name__} | numbers | usages

    @classmethod
    def _from_plain(cls, plain: Mapping[str, object]) -> "Settings":
        """The quantizer of _plain. Errors: ValueError for unknown settings."""
        own = {*cls._configuration, *(f"{kind}_usage" for kind in DATA)}
        given = {name: value for name, value in plain.items() if name != "class"}
        if set(given) != own or not all(isinstance(v, (bool, int, float)) for v in given.values()):
            raise ValueError(f"{cls.__name__}: its settings are {given!r:.200}, wanted numbers for {sorted(own)}.")
        usages = {kind: bool(given[f"{kind}_usage"]) for kind in DATA}
        return cls(**{argument: given[name] for name, argument in cls._configuration.items()}, **usages)

    def _rebuildable(self) -> bool:
        """Whether _plain describes it completely."""
        return self._in_files and type(self) is QUANTIZERS.get(type(self).__name__)

    def _makes_the_same(self, other: "Settings | None", tensor: AnyQuantized) -> bool:
        """Whether `tensor`, made by `other` (None: unknown), has the same format and scaling."""
        if self.storage_class is not None:
            details = {n: v for n, v in self._details().items() if n != "_quantizer"}
            if not isinstance(tensor, self.storage_class) or any(getattr(tensor, n) != v for n, v in details.items()):
                return False
        return other is None or type(other) is type(self)

    def _adopting(self, wanted: "Settings") -> "Settings":
        """The quantizer of its tensor after a recipe selects `wanted`: this one, with settings of its own."""
        if all(getattr(self, name) == getattr(wanted, name) for name in self._configuration):
            return self
        result = self.copy()
        for name in self._configuration:
            setattr(result, name, getattr(wanted, name))
        return result

    def __repr__(self) -> str:
        settings = [f"{name}={getattr(self, name)!r}" for name in self._configuration]
        usages = [kind for kind in DATA if getattr(self, f"{kind}_usage")]
        return f"{type(self).__name__}({', '.join([*settings, f'usages={usages}'])})"
