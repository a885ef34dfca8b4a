"""What an example needs beyond the package: imported here, so that what is missing is named with its command. Installs
nothing itself."""

import importlib
from types import ModuleType


def need(module: str, extra: str) -> ModuleType:
    """The module, or an exit that says which extra of the package brings it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != module.partition(".")[0]:
            raise  # it is there, and something that it needs itself is not
        raise SystemExit(
            f"this example needs {module.partition('.')[0]}, which is not installed: "
            f"pip install 'transformer_engine[{extra}]'\n"
            f"(where the package is installed; else, in the clone: pip install '.[{extra}]')"
        ) from None
