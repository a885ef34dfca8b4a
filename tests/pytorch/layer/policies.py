# The policies of tests/layer, as modules. TE_LAYER_POLICIES: the folder where they were built (build/test/layer).
import ctypes
import functools
import importlib.machinery
import importlib.util
import os
import pathlib
import sysconfig

from transformer_engine.pytorch import _C

_BUILT = pathlib.Path(__file__).parents[3] / "build" / "test" / "layer"

# Checks that a policy changes by its nature are left out under it: the test's name, up to its parameters.
NOT_ASKED = {
    "tp_comm_in_chunks": {
        "test_bits_of_torch_on_the_cpu": "the plain loop computes",
        "test_drop_in_for_torch": "the plain loop computes",
        "test_the_activation_is_recomputed_over_its_gradient": "it bounds the memory of the default layers",
    },
    "two_weights": {
        "test_bits_of_torch_on_the_cpu": "the plain loop computes",
        "test_drop_in_for_torch": "the plain loop computes",
        "test_values_and_gradients": "a weight's gradient is two that are rounded to 16 bits before they are added",
        "test_memory_layouts": "a weight's gradient is a sum of two, whose bits one row more or less changes",
        "test_opcheck": "the traced route has one weight, the eager one two",
        "test_compiled_bits_equal_eager": "the traced route has one weight, the eager one two",
        "test_inductor_bits_equal_eager": "the traced route has one weight, the eager one two",
        "test_recomputing_compiles": "the traced route has one weight, the eager one two",
        "test_autocast": "a weight's gradient is two that are rounded to 16 bits before they are added",
        "test_autocast_trains_float32_parameters": "as above: rounded twice",
        "test_main_grad_accumulates_in_float32": "two products are added to main_grad, one after the other",
        "test_bad_input_is_named_and_harmless": "a product sees some rows, and names their shape",
        "test_weight_gradients_elsewhere": "it takes a product of one matrix apart",
        "test_the_activation_is_recomputed_over_its_gradient": "it bounds the memory of the default layers",
    },
    "recomputed": {
        "test_only_what_is_wanted": "it checks the saved tensors",
        "test_packed_pre_activation": "it checks the saved tensors",
        "test_keeps_norm_input_statistics_norm_output_and_weights": "it checks the saved tensors",
        "test_recomputing_the_norm_output_gives_the_same_bits": "it checks the saved tensors",
        "test_never_keeps_the_activation": "it checks the saved tensors",
        "test_recompute_norm_output_keeps_everything_else": "it checks the saved tensors",
        "test_the_activation_is_recomputed_over_its_gradient": "it bounds the memory of the default layers",
    },
}


@functools.cache
def policy(name):
    ctypes.CDLL(_C.__file__, mode=ctypes.RTLD_GLOBAL)  # whose symbols they are made of
    folder = pathlib.Path(os.environ.get("TE_LAYER_POLICIES", _BUILT))
    path = folder / f"{name}.so"
    if not path.exists():
        path = folder / (name + sysconfig.get_config_var("EXT_SUFFIX"))
    loader = importlib.machinery.ExtensionFileLoader(name, str(path))
    spec = importlib.util.spec_from_loader(name, loader)
    module = importlib.util.module_from_spec(spec)
    loader.exec_module(module)
    return module


def install(name):
    """For the whole process. Where rows are cut, CPU products go by the plain loop: its bits do not depend on that."""
    if name != "recomputed":
        _C.set_cpu_products("loop")
    policy(name).install()
