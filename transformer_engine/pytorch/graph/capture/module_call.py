"""The eager call of a captured module whose class overrides __call__, around forward or in place of it.

- Nothing is captured here.
"""

import copy
import functools
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

import torch

from transformer_engine.pytorch._internal.capture_flag import as_captured
from transformer_engine.pytorch.module.base import TransformerEngineBaseModule

_HOOKS = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")


def overrides_call(module: torch.nn.Module) -> bool:
    return type(module).__call__ is not torch.nn.Module.__call__


def eager_function(module: object) -> Callable:
    """The function that a call of `module` runs, without its hooks."""
    if not isinstance(module, torch.nn.Module):
        return module
    return ModuleCall(module) if overrides_call(module) else module.forward


@functools.cache
def _base_attributes() -> frozenset[str]:
    """Attributes of every module of torch and of this library, independent of the class."""
    return frozenset(vars(TransformerEngineBaseModule()))


def _shallow_copy(value: object) -> object:
    return copy.copy(value) if type(value) in (list, dict, set) else value


class ModuleCall:
    """Calls a module by the __call__ of its class, with the forward that the module has now.

    - A captured callable may replace that forward later.
    - It runs as in a capture: the class may choose by is_graph_capturing() what is captured.
    - It runs without hooks: they run around a captured callable.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        self.module, self.call = module, type(module).__call__
        self.instance_forward = vars(module).get("forward")
        self.forward = module.forward
        self.attributes: dict[str, object] | None = None
        self.running = False

    def freeze(self) -> None:
        """Later calls see the present attributes, as a graph does. An attribute that selects a branch in the class, for
        example whether captured callables exist, may change after the capture."""
        self.attributes = self._attributes()

    def _attributes(self) -> dict[str, object]:
        own = vars(self.module).items()
        return {name: _shallow_copy(value) for name, value in own if name not in _base_attributes()}

    @property
    def __signature__(self) -> inspect.Signature:
        """The signature of __call__, or that of forward if __call__ takes arbitrary keywords."""
        own = inspect.signature(self.call.__get__(self.module))
        kinds = {parameter.kind for parameter in own.parameters.values()}
        return inspect.signature(self.forward) if inspect.Parameter.VAR_KEYWORD in kinds else own

    def __call__(self, *args, **kwargs) -> object:
        self.running = True
        try:
            with self._eager_state(), as_captured():
                return self.call(self.module, *args, **kwargs)
        finally:
            self.running = False

    @contextmanager
    def _eager_state(self) -> Iterator[None]:
        own = vars(self.module)
        hooks = [(own[name], dict(own[name])) for name in _HOOKS]
        now = {name: value for name, value in own.items() if name not in _base_attributes()}
        if self.attributes is not None:
            self._set_attributes(now, {name: _shallow_copy(value) for name, value in self.attributes.items()})
        own.pop("forward", None)
        if self.instance_forward is not None:
            own["forward"] = self.instance_forward
        for registered, _ in hooks:
            registered.clear()
        try:
            yield
        finally:
            for registered, before in hooks:
                registered.update(before)
            if self.attributes is not None:
                self._set_attributes([name for name in own if name not in _base_attributes()], now)
            own.pop("forward", None)
            if "forward" in now:
                own["forward"] = now["forward"]

    def _set_attributes(self, names: Iterable[str], attributes: dict[str, object]) -> None:
        own = vars(self.module)
        for name in list(names):
            del own[name]
        own.update(attributes)


class _ForwardOnly:
    """A base class in front of a class that overrides __call__: the graph contains what that __call__ does."""

    __call__ = torch.nn.Module.__call__

    def __init_subclass__(cls) -> None:
        """Hides that of the class, which may register subclasses or require arguments."""


def call_forward_only(module: torch.nn.Module) -> Callable[[], None]:
    """A call of the module runs only its forward from now on. Returns a function that restores its class."""
    cls = type(module)
    named = {"__module__": cls.__module__, "__qualname__": cls.__qualname__, "__doc__": cls.__doc__}
    object.__setattr__(module, "__class__", type(cls)(cls.__name__, (_ForwardOnly, cls), named))
    return functools.partial(object.__setattr__, module, "__class__", cls)
