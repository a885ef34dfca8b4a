"""Older paths of names that have moved: modules without code of their own, made from one table. An import of such a
path gives the same objects; nothing is wrapped, and nothing warns."""

import sys
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from types import ModuleType

_ROOT = "transformer_engine.pytorch"

# path: {the module with the names, from _ROOT on or in full: these names}
ALIASES: dict[str, dict[str, str]] = {
    "cpu_offload_v1": {
        "cpu_offload": (
            "DefaultOffloadSynchronizer ManualOffloadSynchronizer OffloadContext OffloadableLayerState "
            "PinnedMemoryError get_cpu_offload_context is_cpu_offload_enabled mark_activation_offload "
            "mark_not_offload start_offload"
        ),
    },
    "distributed": {
        "data_parallel": (
            "BucketGroup DistributedDataParallel DistributedDataParallelConfig ParamAndGradBuffer ensure_params_ready "
            "partition_buckets"
        ),
    },
    "float8_tensor": {"tensor.float8": "Float8Tensor"},
    "fp8": {
        "transformer_engine.common.recipe": "DelayedScaling Format",
        "quantization.delayed": "_amax_and_scale_update",
        "quantization.state.autocast_state": "get_default_fp8_recipe",
        "quantization": (
            "CustomRecipeState DelayedScalingRecipeState DelayedScalingRequest FP8GlobalStateManager "
            "Float8BlockScalingRecipeState Float8CurrentScalingRecipeState QuantizerRequest QuantizerRole RecipeState "
            "autocast check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support "
            "fp8_autocast fp8_model_init get_align_size_for_quantization get_default_recipe get_fp8_max "
            "get_fp8_te_dtype get_fp8_torch_dtype is_fp8_available is_fp8_block_scaling_available is_mxfp8_available "
            "is_nvfp4_available quantized_model_init"
        ),
    },
    "module": {
        "module.base": "TransformerEngineBaseModule",
        "module.fp8_padding": "Fp8Padding Fp8Unpadding",
        "module.grouped_linear": "GroupedLinear",
        "module.layernorm": "LayerNorm",
        "module.layernorm_linear": "LayerNormLinear",
        "module.layernorm_mlp": "LayerNormMLP",
        "module.linear": "Linear",
        "module.rmsnorm": "RMSNorm",
    },
    "module.layernorm_linear": {"cpp_extensions": "general_gemm"},
    "module.linear": {"cpp_extensions": "general_gemm"},
    "module._common": {"module.weight_grad": "WeightGradStore", "functional": "noop_cat"},
    "optimizers": {"data_parallel": "DistributedOptimizer"},
    # Pickles name classes and functions of quantization by the files that these had before its folders.
    "quantization.availability": {
        "quantization.recipes.availability": (
            "check_fp8_block_scaling_support check_fp8_support check_mxfp8_support check_nvfp4_support "
            "is_fp8_available is_fp8_block_scaling_available is_mxfp8_available is_nvfp4_available"
        ),
    },
    "quantization.contexts": {
        "quantization.state.contexts": "autocast fp8_autocast fp8_model_init quantized_model_init",
    },
    "quantization.formats": {
        "quantization.recipes.formats": (
            "get_align_size_for_quantization get_fp8_max get_fp8_te_dtype get_fp8_torch_dtype"
        ),
    },
    "quantization.manager": {"quantization.state.manager": "FP8GlobalStateManager QuantizationState"},
    "quantization.module_api": {"quantization.module.api": "QuantizedModule"},
    "quantization.products": {"quantization.recipes.products": "Plan"},
    "quantization.recipe_state": {
        "quantization.recipes.recipe_state": (
            "CustomRecipeState DelayedScalingRecipeState Float8BlockScalingRecipeState Float8CurrentScalingRecipeState "
            "RecipeState"
        ),
    },
    "quantization.surroundings": {"quantization.state.autocast_state": "get_default_fp8_recipe get_default_recipe"},
    "quantized_tensor": {
        "tensor": (
            "QuantizedTensor QuantizedTensorStorage Quantizer prepare_for_saving restore_from_func_ctx "
            "restore_from_saved"
        ),
    },
    "tensor.float8": {"tensor.float8_delayed": "Float8Quantizer"},  # the path in pickles
    "tensor.float8_blockwise_tensor": {
        "tensor.float8_blockwise": "Float8BlockQuantizer Float8BlockwiseQTensor Float8BlockwiseQTensorStorage",
    },
    "tensor.float8_tensor": {
        "tensor.float8": "Float8CurrentScalingQuantizer Float8Tensor Float8TensorStorage",
        "tensor.float8_delayed": "Float8Quantizer",
    },
    "tensor.hybrid_tensor": {"tensor.hybrid": "HybridQuantizedTensor HybridQuantizedTensorStorage HybridQuantizer"},
    "tensor.identity_tensor": {"tensor.identity": "IdentityQuantizer IdentityTensor IdentityTensorStorage"},
    "tensor.mxfp8_tensor": {"tensor.blackwell": "MXFP8Quantizer MXFP8Tensor MXFP8TensorStorage"},
    "tensor.nvfp4_tensor": {"tensor.blackwell": "NVFP4Quantizer NVFP4Tensor NVFP4TensorStorage"},
}


def _install(path: str, homes: dict[str, str]) -> None:
    full = f"{_ROOT}.{path}"
    file = find_spec(full)  # a file whose module gets further names
    alias = _made(full, homes) if file is None else import_module(full)
    for home, names in homes.items():
        source = import_module(home if home.startswith("transformer_engine.") else f"{_ROOT}.{home}")
        for name in names.split():
            setattr(alias, name, getattr(source, name))


def _made(full: str, homes: dict[str, str]) -> ModuleType:
    package, _, last = full.rpartition(".")
    alias = ModuleType(full, f"Names of {' and '.join(homes)} at a path that clients import.")
    alias.__spec__ = ModuleSpec(full, None, origin=__file__)  # importlib.util.find_spec needs it
    alias.__package__, alias.__file__ = package, __file__
    sys.modules[full] = alias
    setattr(import_module(package), last, alias)
    return alias


for _path, _homes in ALIASES.items():
    _install(_path, _homes)
