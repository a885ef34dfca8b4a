"""The version of torch, for comparisons."""

import functools
import re

import torch


@functools.cache
def torch_version() -> tuple[int, ...]:
    """(major, minor, patch) of the running torch, without its suffix: 2.11.0a0+git is (2, 11, 0)."""
    return tuple(int(number) for number in re.match(r"\d+(?:\.\d+)*", torch.__version__)[0].split("."))
