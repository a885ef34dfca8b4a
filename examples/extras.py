"""Imports the requirements of an example beyond the package. If one is missing, the error has the command that installs
it. Installs nothing itself."""

import importlib
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """Returns the module, or exits with the name of the extra that provides it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # the module is there, but one of its own requirements is not
        raise SystemExit(
            f"this example needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'transformer_engine[{extra}]'\n"
            f"(where the package is installed; else, in the clone: pip install '.[{extra}]')"
        ) from None
