"""Fused transformer modules for PyTorch: ``import transformer_engine.pytorch as te``.

``import transformer_engine`` alone is cheap; ``.pytorch``, ``.common`` and ``.doctor`` are imported when they are first
touched.
"""

import importlib

__version__ = "2.20.0"

_SUBPACKAGES = ("common", "doctor", "pytorch")


def __getattr__(name):
    if name in _SUBPACKAGES:
        return importlib.import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__():
    return sorted([*globals(), *_SUBPACKAGES])
