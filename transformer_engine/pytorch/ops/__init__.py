"""te.ops, the fusible operations: a place for them. None is available in this version; LayerNormLinear and LayerNormMLP
are the fusions."""

from transformer_engine.pytorch._internal.absent import names_without_a_body

__getattr__ = names_without_a_body(
    __name__,
    {"*": ("fusible operations are", "use torch.nn.Sequential with LayerNormLinear and LayerNormMLP")},
)
