"""Reports versions, capabilities and missing parts: ``te.doctor()`` or ``python -m transformer_engine.doctor``.

It only prints, repairs nothing, never raises, and initialises CUDA only if it is asked to describe the devices.
"""

import argparse
import importlib
import pathlib
import platform
import sys
import types

import transformer_engine

_NEEDED_FOR = {
    "cuda": "anything on a GPU; it comes with the NVIDIA driver",
    "cublasLt": "matrix products on a GPU; torch's CUDA build brings it",
    "nccl": "several GPUs; torch's CUDA build brings it",
}
_REINSTALL = "reinstall with `pip install .` from the sources"
_SOURCE_TREE = "this is the source tree, hiding the installed package: run from another folder, or set PYTHONSAFEPATH=1"


def _line(error: BaseException) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def _packages():
    for name in ("torch", "numpy"):
        try:
            module = importlib.import_module(name)
            detail = module.__version__
            if name == "torch":
                detail += f" (CUDA {module.version.cuda})" if module.version.cuda else " (CPU build)"
            yield name, detail, None
        except Exception as error:
            yield name, f"does not import: {_line(error)}", f"pip install {name}"


def _build():
    try:
        extension = transformer_engine.pytorch._C  # this access imports it
    except Exception as error:
        in_sources = (pathlib.Path(transformer_engine.__path__[0]).parent / "pyproject.toml").exists()
        yield "extension", f"does not load: {_line(error)}", _SOURCE_TREE if in_sources else _REINSTALL
        return
    yield "extension", f"loads; built with torch {extension.torch_version}", None
    if extension.built_with_cuda:
        yield "CUDA kernels", "compiled in (sm_90a)", None
    else:
        yield "CUDA kernels", "not compiled in", f"for a Hopper GPU, put nvcc >= 12.9 on PATH and {_REINSTALL}"
    for name, purpose in _NEEDED_FOR.items():
        why = extension.probe_library(name)
        detail = "opens" if not why else f"does not open: {_line(Exception(why)).removesuffix('; tried:')}"
        yield f"library {name}", detail, f"needed for {purpose}" if why else None


def _devices(describe: bool):
    try:
        torch = importlib.import_module("torch")
        yield "CPU", f"{platform.machine()}, {torch.get_num_threads()} threads", None
        count = torch.cuda.device_count()
        yield "GPUs", str(count), None
        for index in range(count if describe else 0):
            properties = torch.cuda.get_device_properties(index)
            detail = f"{properties.name}, sm_{properties.major}{properties.minor}, {properties.total_memory >> 30} GiB"
            hopper = (properties.major, properties.minor) == (9, 0)
            yield f"cuda:{index}", detail, None if hopper else "the kernels here are for sm_90 (Hopper)"
    except Exception as error:
        yield "devices", f"cannot be listed: {_line(error)}", "the lines above say what is missing"


def _rows(describe_devices: bool):
    yield "transformer_engine", f"{transformer_engine.__version__} in {transformer_engine.__path__[0]}", None
    yield "python", f"{platform.python_version()} ({sys.executable}), {platform.platform()}", None
    yield from _packages()
    yield from _build()
    yield from _devices(describe_devices)


def doctor(*, devices: bool = False) -> None:
    """Prints versions, build facts, libraries and devices, each with the fix if something is missing.

    devices: also name each GPU, which initialises CUDA.
    """
    for name, detail, fix in _rows(devices):
        print(f"{name:<20}{detail}" + (f"\n{'':<20}-> {fix}" if fix else ""))


class _CallableModule(types.ModuleType):
    """transformer_engine.doctor is this module, and called it is the function."""

    def __call__(self, *, devices: bool = False) -> None:
        doctor(devices=devices)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m transformer_engine.doctor", description=doctor.__doc__)
    parser.add_argument("--devices", action="store_true", help="name each GPU (initialises CUDA)")
    doctor(devices=parser.parse_args().devices)
