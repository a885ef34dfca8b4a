"""Modules of others that the first call to want them brings: importing this package is to bring nothing beside torch,
and some of them a machine may lack."""

from importlib import import_module
from types import ModuleType


def late(name: str) -> ModuleType:
    """The module; ImportError where there is none."""
    return import_module(name)
