"""Quantization contexts, recipes, and the functions that clients call: names alone, each from the file that implements
it. delayed.py and roles.py are in no folder, because pickles name their classes by this path."""

from transformer_engine.pytorch.quantization.recipes.availability import (
    check_fp8_block_scaling_support as check_fp8_block_scaling_support,
)
from transformer_engine.pytorch.quantization.recipes.availability import check_fp8_support as check_fp8_support
from transformer_engine.pytorch.quantization.recipes.availability import check_mxfp8_support as check_mxfp8_support
from transformer_engine.pytorch.quantization.recipes.availability import check_nvfp4_support as check_nvfp4_support
from transformer_engine.pytorch.quantization.recipes.availability import is_fp8_available as is_fp8_available
from transformer_engine.pytorch.quantization.recipes.availability import (
    is_fp8_block_scaling_available as is_fp8_block_scaling_available,
)
from transformer_engine.pytorch.quantization.recipes.availability import is_mxfp8_available as is_mxfp8_available
from transformer_engine.pytorch.quantization.recipes.availability import is_nvfp4_available as is_nvfp4_available
from transformer_engine.pytorch.quantization.recipes.formats import (
    get_align_size_for_quantization as get_align_size_for_quantization,
)
from transformer_engine.pytorch.quantization.recipes.formats import get_fp8_max as get_fp8_max
from transformer_engine.pytorch.quantization.recipes.formats import get_fp8_te_dtype as get_fp8_te_dtype
from transformer_engine.pytorch.quantization.recipes.formats import get_fp8_torch_dtype as get_fp8_torch_dtype
from transformer_engine.pytorch.quantization.recipes.recipe_state import CustomRecipeState as CustomRecipeState
from transformer_engine.pytorch.quantization.recipes.recipe_state import (
    DelayedScalingRecipeState as DelayedScalingRecipeState,
)
from transformer_engine.pytorch.quantization.recipes.recipe_state import (
    Float8BlockScalingRecipeState as Float8BlockScalingRecipeState,
)
from transformer_engine.pytorch.quantization.recipes.recipe_state import (
    Float8CurrentScalingRecipeState as Float8CurrentScalingRecipeState,
)
from transformer_engine.pytorch.quantization.recipes.recipe_state import RecipeState as RecipeState
from transformer_engine.pytorch.quantization.roles import DelayedScalingRequest as DelayedScalingRequest
from transformer_engine.pytorch.quantization.roles import QuantizerRequest as QuantizerRequest
from transformer_engine.pytorch.quantization.roles import QuantizerRole as QuantizerRole
from transformer_engine.pytorch.quantization.state.autocast_state import get_default_recipe as get_default_recipe
from transformer_engine.pytorch.quantization.state.contexts import autocast as autocast
from transformer_engine.pytorch.quantization.state.contexts import fp8_autocast as fp8_autocast
from transformer_engine.pytorch.quantization.state.contexts import fp8_model_init as fp8_model_init
from transformer_engine.pytorch.quantization.state.contexts import quantized_model_init as quantized_model_init
from transformer_engine.pytorch.quantization.state.manager import FP8GlobalStateManager as FP8GlobalStateManager
