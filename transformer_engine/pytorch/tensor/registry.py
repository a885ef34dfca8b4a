"""Who is there: every format and every quantizer, by name. Their files tell it of themselves; files below them, which
import none of them, ask here. It computes nothing."""

import torch

# What the values of a quantized tensor may be: its nominal dtype.
FLOATS = (torch.float32, torch.float16, torch.bfloat16)

# Class name -> class, of every format and of every quantizer: how a file finds them again.
FORMATS: dict[str, type] = {}
QUANTIZERS: dict[str, type] = {}


class AnyQuantized:
    """What every quantized storage is, whatever its format: `isinstance` for files below them."""
