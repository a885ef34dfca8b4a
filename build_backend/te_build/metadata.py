"""The wheel's requirement of the PyTorch minor version that it was compiled against; an sdist has the range alone."""

from collections.abc import Mapping
from typing import Any

from te_build import target

_of_sdist = False


def build_state(state: str) -> None:
    global _of_sdist
    _of_sdist = state == "sdist"


def dynamic_wheel(settings: Mapping[str, Any]) -> dict[str, bool]:
    return {"dependencies": True}


def dynamic_metadata(settings: Mapping[str, Any], project: Mapping[str, Any]) -> dict[str, Any]:
    """Comes on top of what pyproject.toml states."""
    return {"dependencies": [] if _of_sdist else [f"torch=={target.needed().minor}.*"]}
