# Shared by the tests of quantized tensors under offload: a quantizer of every format, and the parts of a tensor. No
# test is here.
import torch

import transformer_engine.pytorch as te

E4M3 = te.DType.kFloat8E4M3


def quantizers(device):
    both = {"rowwise": True, "columnwise": True}
    current, block = te.Float8CurrentScalingQuantizer(E4M3, device), te.Float8BlockQuantizer(E4M3, **both)
    scale, amax = torch.full((1,), 2.0, device=device), torch.zeros(1, device=device)
    return {
        "delayed": te.Float8Quantizer(scale, amax, E4M3),
        "current": current,
        "block": block,
        "block1d": te.Float8BlockQuantizer(E4M3, **both, block_scaling_dim=1),
        "hybrid": te.HybridQuantizer(rowwise_quantizer=current, columnwise_quantizer=block),
        "identity": te.IdentityQuantizer(),
    }


FORMATS = list(quantizers("cpu"))


def parts(tensor):
    return [t for t in te.prepare_for_saving(tensor)[0] if t is not None]
