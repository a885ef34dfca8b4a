"""Loads the extension module, after checking that it can run here. Nothing else belongs in this file."""

import torch  # first: the extension finds torch's libraries by soname

try:
    from transformer_engine.pytorch import _C
except ImportError as error:
    raise ImportError(
        f"transformer_engine: the extension module cannot be loaded ({error}). It was built for another Python or "
        f"torch than the running torch {torch.__version__}, or not at all: reinstall it with "
        "`pip install .`. Or this is the source tree, hiding the installed package because it is "
        "the current folder: run from another one, or set PYTHONSAFEPATH=1"
    ) from error

_built, _running = _C.torch_version.split(".")[:2], torch.__version__.split("+")[0].split(".")[:2]
if _built != _running:
    raise ImportError(
        f"transformer_engine: built with torch {_C.torch_version}, running torch {torch.__version__}; their major and "
        "minor versions must agree. Reinstall it with `pip install .`"
    )
