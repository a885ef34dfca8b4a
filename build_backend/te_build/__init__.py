"""The build backend, by the hooks of PEP 517 and PEP 660: those of scikit-build-core, with the PyTorch to
compile against, after the requirements of a build were checked."""

from collections.abc import Callable
from typing import Any

from scikit_build_core import build as _scikit

from te_build import checks, target

Settings = dict[str, Any] | None


def get_requires_for_build_sdist(config_settings: Settings = None) -> list[str]:
    return _scikit.get_requires_for_build_sdist(config_settings)


def build_sdist(sdist_directory: str, config_settings: Settings = None) -> str:
    return _scikit.build_sdist(sdist_directory, config_settings)


def get_requires_for_build_wheel(config_settings: Settings = None) -> list[str]:
    """CMake and Ninja where the machine's are missing or too old, and PyTorch where the environment has none: of the
    range that is served, of which a frontend takes the newest."""
    missing = [] if target.find() else [str(target.served())]
    checks.all_of_them()
    return [*_scikit.get_requires_for_build_wheel(config_settings), *missing]


get_requires_for_build_editable = get_requires_for_build_wheel


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Settings = None) -> str:
    return _scikit.prepare_metadata_for_build_wheel(metadata_directory, config_settings)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Settings = None) -> str:
    return _scikit.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def _build(by: Callable[..., str], folder: str, settings: Settings, metadata: str | None, unity: str) -> str:
    torch = target.needed()
    checks.all_of_them()
    try:
        defines = {"cmake.define.TE_TORCH": torch.facts, "cmake.define.TE_UNITY": unity}
        return by(folder, {**defines, **(settings or {})}, metadata)
    except (SystemExit, OSError):
        checks.full()
        raise


def build_wheel(wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None) -> str:
    return _build(_scikit.build_wheel, wheel_directory, config_settings, metadata_directory, unity="ON")


def build_editable(
    wheel_directory: str, config_settings: Settings = None, metadata_directory: str | None = None
) -> str:
    return _build(_scikit.build_editable, wheel_directory, config_settings, metadata_directory, unity="OFF")
