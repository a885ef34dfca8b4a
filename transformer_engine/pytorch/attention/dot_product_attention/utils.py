"""Queries of clients about the package flash-attn before they use it themselves. Attention here runs in PyTorch, which
does not need that package, and it is not searched for."""

import functools


@functools.cache
def _no_version() -> object:
    """Version 0, in a form that clients compare; packaging, if it is installed, is imported on demand."""
    try:
        from packaging.version import Version
    except ImportError:
        return "0"
    return Version("0")


class _Versions(type):
    version = fa3_version = fa4_version = property(lambda cls: _no_version())


class FlashAttentionUtils(metaclass=_Versions):
    """No version of flash-attn is in use, whatever is installed: all flags are False, the versions 0."""

    is_installed = v3_is_installed = v4_is_installed = use_v3 = use_v4 = False
    v2_plus = v2_1_plus = v2_3_plus = v2_4_plus = v2_4_1_plus = v2_5_7_plus = v2_6_0_plus = v2_7_0_plus = False
