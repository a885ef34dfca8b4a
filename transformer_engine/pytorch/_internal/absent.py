"""Names whose capability this version lacks. If clients import them without a guard (`absent`), the name exists, can be
subclassed and inspected, and raises when it is used. If clients have a fallback for a failing import
(`names_without_a_body`), the name does not exist. Nothing else belongs in this file."""

import functools
import opcode
import sys
from collections.abc import Callable, Mapping
from types import FrameType

import torch

_IMPORT_FROM = opcode.opmap["IMPORT_FROM"]


def _sentence(name: str, capability: str, instead: str) -> str:
    advice = f"; {instead}" if instead else ""
    return f"{name}: {capability} not available in this version{advice}."


def refusal(name: str, capability: str, instead: str = "") -> NotImplementedError:
    return NotImplementedError(_sentence(name, capability, instead))


def absent(capability: str, instead: str = "") -> Callable:
    """Makes a function, or a class's construction, raise NotImplementedError naming itself and `capability` ("MoE
    permutation is"), with the way out, `instead`. Its signature and docstring stay unchanged, and inherited members
    too. When the capability lands, the body is written and the decorator is removed."""

    def mark(target: Callable) -> Callable:
        def refuse(*args, **kwargs):
            raise refusal(target.__qualname__, capability, instead)

        if not isinstance(target, type):
            refusing = functools.wraps(target)(refuse)
            refusing.absent_capability = capability
            return refusing
        target.__init__ = functools.wraps(target.__init__)(refuse)
        if issubclass(target, torch.Tensor):  # __new__ would take the arguments first
            target.__new__ = refuse
        target.absent_capability = capability
        return target

    return mark


def names_without_a_body(module: str, names: Mapping[str, tuple[str, str]]) -> Callable[[str], object]:
    """The __getattr__ of a module that lacks `names`: name -> (capability, instead) as of `absent`; "*" stands for all
    other public names. hasattr returns False, and `from module import name` is an ImportError with that sentence. When
    the capability lands, the name is removed from the table."""

    def __getattr__(name: str) -> object:
        found = names.get(name) or (None if name.startswith("_") else names.get("*"))
        if found is None:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        sentence = _sentence(f"{module}.{name}", *found)
        if _imports(sys._getframe(1)):
            raise ImportError(sentence, name=module)
        raise AttributeError(sentence)

    return __getattr__


def _imports(frame: FrameType) -> bool:
    """Whether the frame runs `from module import name`, which replaces the text of an AttributeError by its own."""
    return frame.f_code.co_code[frame.f_lasti] == _IMPORT_FROM
