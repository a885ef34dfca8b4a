"""te.ops, the fusible operations: its place. None is here yet; LayerNormLinear and LayerNormMLP are the fusions there
are."""

from transformer_engine.pytorch._internal.absent import names_without_a_body

__getattr__ = names_without_a_body(
    __name__,
    {"*": ("fusible operations are", "use torch.nn.Sequential with LayerNormLinear and LayerNormMLP")},
)
