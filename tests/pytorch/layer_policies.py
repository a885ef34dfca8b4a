# The policies of tests/layer, as modules. TE_LAYER_POLICIES: the folder where they were built (build/test/layer).
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import pathlib
import sysconfig

from transformer_engine.pytorch import _C

_BUILT = pathlib.Path(__file__).parents[2] / "build" / "test" / "layer"


@functools.cache
def policy(name):
    ctypes.CDLL(_C.__file__, mode=ctypes.RTLD_GLOBAL)  # whose symbols they are made of
    folder = pathlib.Path(os.environ.get("TE_LAYER_POLICIES", _BUILT))
    path = folder / f"{name}.so"
    if not path.exists():
        path = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module
