"""Padding of each expert's rows to what FP8 products need: the names that clients import. It is not here yet."""

import torch

from transformer_engine.pytorch._absent import absent

_PADDING = "FP8 is"


@absent(_PADDING)
class Fp8Padding(torch.nn.Module):
    """Pads each of the chunks of rows."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None: ...


@absent(_PADDING)
class Fp8Unpadding(torch.nn.Module):
    """Takes the padding away."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None: ...
