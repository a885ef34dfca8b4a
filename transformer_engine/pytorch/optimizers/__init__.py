"""Fused optimizers and the multi-tensor functions: their place. None is here yet."""

from transformer_engine.pytorch._absent import names_without_a_body

_FUNCTIONS = "multi-tensor functions are"

__getattr__ = names_without_a_body(
    __name__,
    {
        "FusedAdam": ("fused optimizers are", "use torch.optim.AdamW(fused=True)"),
        "FusedSGD": ("fused optimizers are", "use torch.optim.SGD(fused=True)"),
        "MultiTensorApply": (_FUNCTIONS, "use torch._foreach_mul and its like"),
        **{
            f"multi_tensor_{name}": (_FUNCTIONS, "use torch._foreach_mul and its like")
            for name in (
                "applier",
                "scale",
                "scale_tensor",
                "adam",
                "adam_param_remainder",
                "adam_fp8",
                "adam_capturable",
                "adam_capturable_master",
                "sgd",
                "compute_scale_and_scale_inv",
            )
        },
        "multi_tensor_l2norm": (_FUNCTIONS, "use torch.nn.utils.get_total_norm"),
        "multi_tensor_unscale_l2norm": (_FUNCTIONS, "use torch.nn.utils.get_total_norm"),
    },
)
