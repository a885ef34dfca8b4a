"""CUDA graphs around parts of a model: capture, replay, and the flags and states that clients manage themselves."""

from transformer_engine.pytorch._internal.capture_flag import is_graph_capturing as is_graph_capturing
from transformer_engine.pytorch._internal.capture_flag import set_capture_end as set_capture_end
from transformer_engine.pytorch._internal.capture_flag import set_capture_start as set_capture_start
from transformer_engine.pytorch.graph.capture.callables import make_graphed_callables as make_graphed_callables
from transformer_engine.pytorch.graph.recorded.quantization import restore_fp8_tensors as restore_fp8_tensors
from transformer_engine.pytorch.graph.recorded.quantization import save_fp8_tensors as save_fp8_tensors
