"""Private helpers of this package. Importing any of them loads the extension first (load.py)."""

from transformer_engine.pytorch._internal import load as load
