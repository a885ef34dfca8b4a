"""How eager calls what is captured: a module by its class, whose __call__ may do work of its own around forward, or in
place of it. Captures nothing."""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch._internal.capture_flag import as_captured
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def has_own_call(module: torch.nn.Module) -> bool:
    return type(module).__call__ is not torch.nn.Module.__call__


def function_of(module: object) -> Callable:
    """What a call of it runs, hooks of its own left out."""
    if not isinstance(module, torch.nn.Module):
        return module
    return OwnCall(module) if has_own_call(module) else module.forward


@functools.cache
def _machinery() -> frozenset[str]:
    """Attributes of every module of torch and of this library, which are no matter of its class."""
    return frozenset(vars(TransformerEngineBaseModule()))


def _copied(value: object) -> object:
    return copy.copy(value) if type(value) in (list, dict, set) else value


class OwnCall:
    """A module called by its class's __call__, with the forward that it had when this was made, though a captured
    callable may stand in that one's place since. It runs as in a capture (is_graph_capturing()), by which a class may
    choose what of it is captured, and without hooks: those run around a captured callable."""

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.call = module, type(module).__call__
        self.own_forward = vars(module).get("forward")
        self.forward = module.forward
        self.attributes: dict[str, object] | None = None
        self.running = False

    def freeze(self) -> None:
        """From here on calls see the attributes as they are now, as a graph does: one by which the class chooses its
        way (whether there are captured callables, most often) may change behind the capture."""
        self.attributes = self._attributes()

    def _attributes(self) -> dict[str, object]:
        return {name: _copied(value) for name, value in vars(self.module).items() if name not in _machinery()}

    @property
    def __signature__(self) -> inspect.Signature:
        """Of its __call__, or of its forward where that passes keywords on."""
        own = inspect.signature(self.call.__get__(self.module))
        kinds = {parameter.kind for parameter in own.parameters.values()}
        return inspect.signature(self.forward) if inspect.Parameter.VAR_KEYWORD in kinds else own

    def __call__(self, *args, **kwargs) -> object:
        self.running = True
        try:
            with self._as_it_was(), as_captured():
                return self.call(self.module, *args, **kwargs)
        finally:
            self.running = False

    @contextmanager
    def _as_it_was(self) -> Iterator[None]:
        own = vars(self.module)
        hooks = [(own[name], dict(own[name])) for name in _HOOKS]
        now = {name: value for name, value in own.items() if name not in _machinery()}
        if self.attributes is not None:
            self._become(now, {name: _copied(value) for name, value in self.attributes.items()})
        own.pop("forward", None)
        if self.own_forward is not None:
            own["forward"] = self.own_forward
        for registered, _ in hooks:
            registered.clear()
        try:
            yield
        finally:
            for registered, before in hooks:
                registered.update(before)
            if self.attributes is not None:
                self._become([name for name in own if name not in _machinery()], now)
            own.pop("forward", None)
            if "forward" in now:
                own["forward"] = now["forward"]

    def _become(self, names: Iterable[str], attributes: dict[str, object]) -> None:
        own = vars(self.module)
        for name in list(names):
            del own[name]
        own.update(attributes)


class _Replaying:
    """Before a class with a __call__ of its own: a module of it is a captured callable now, which has all that does."""

    __call__ = torch.nn.Module.__call__

    def __init_subclass__(cls) -> None:
        """Not the class's own, which may keep a list, or want arguments."""


def replaying(module: torch.nn.Module) -> Callable[[], None]:
    """Lets a call of the module reach its forward, once, and nothing else. Returns what puts its class back."""
    of = type(module)
    named = {"__module__": of.__module__, "__qualname__": of.__qualname__, "__doc__": of.__doc__}
    object.__setattr__(module, "__class__", type(of)(of.__name__, (_Replaying, of), named))
    return functools.partial(object.__setattr__, module, "__class__", of)
