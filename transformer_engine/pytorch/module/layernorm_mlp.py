"""LayerNormMLP: norm, first product, activation and second product in one autograd node. The activation is not saved.
csrc/layer/save_rules.cpp decides what either product saves, and why; quantization/module/weights.py keeps FP8 copies
of the two weights between calls."""

from collections.abc import Callable, Iterator, Mapping

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._internal.arguments import check_function, check_size, check_tensor
from transformer_engine.pytorch._internal.keywords import check_keywords
from transformer_engine.pytorch.distributed.stacked import Stack, register_stacks
from transformer_engine.pytorch.module.base import InitMethod, check_choice
from transformer_engine.pytorch.module.config import NormConfig, ParallelConfig, ParameterConfig, ProductConfig
from transformer_engine.pytorch.module.error_context import raise_for_module
from transformer_engine.pytorch.module.linear_family import LinearFamily
from transformer_engine.pytorch.module.norm_parameters import declare_norm, norm_options
from transformer_engine.pytorch.module.parallel import divided, tp_comm_of
from transformer_engine.pytorch.quantization.module.primary_weights import plain

_CLAMPED = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def activation_parameters(op: str, activation: str, params: Mapping[str, float] | None) -> tuple[float, ...]:
    """activation_params in the form of functional.activation; only clamped_swiglu has any."""
    if activation not in functional.activation_kinds:
        raise ValueError(
            f"{op}: argument 'activation' is {activation!r}, wanted one of {', '.join(functional.activation_kinds)}."
        )
    if not params:
        return ()
    if activation != "clamped_swiglu":
        raise ValueError(
            f"{op}: argument 'activation_params' is {dict(params)!r}, but {activation!r} takes none; "
            "only 'clamped_swiglu' does."
        )
    unknown = set(params) - set(_CLAMPED)
    if unknown:
        raise ValueError(f"{op}: argument 'activation_params' has {sorted(unknown)}, wanted some of {list(_CLAMPED)}.")
    try:
        return tuple(float({**_CLAMPED, **params}[name]) for name in _CLAMPED)
    except (TypeError, ValueError):
        raise ValueError(f"{op}: argument 'activation_params' is {dict(params)!r}, wanted numbers.") from None


class LayerNormMLP(LinearFamily):
    """y = act(norm(x) fc1^T + fc1_bias) fc2^T + fc2_bias.

    Parameters `layer_norm_weight/_bias`, `fc1_weight/_bias` (twice as wide for gated activations, the half that the
    activation acts on first), `fc2_weight/_bias`. Saved for backward: the norm's input, statistics and output, and the
    pre-activation. With checkpoint only the norm's input is saved, and the backward recomputes the rest up to the
    activation, to the same bits; with recompute_norm_output (an extension of the common API) all but the norm's output.
    save_preactivation="fp8" (an extension too): the pre-activation is saved as E4M3 with a power-of-two scale for each
    128 of a row, in half the memory; the backward computes the activation and its derivative from those values.
    Returns y, then fc2_bias with return_bias, then the norm's output with return_layernorm_output
    (return_layernorm_output_gathered as LayerNormLinear's).
    fuse_wgrad_accumulation and delay_wgrad_compute as in Linear.
    """

    _op = "LayerNormMLP"
    _products = ("fc1", "fc2")

    @check_keywords()
    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        return_bias: bool = False,
        get_rng_state_tracker: Callable | None = None,
        tp_group: object | None = None,
        tp_size: int = 1,
        init_method: InitMethod | None = None,
        bias: bool = True,
        normalization: str = "LayerNorm",
        activation: str = "gelu",
        activation_params: Mapping[str, float] | None = None,
        output_layer_init_method: InitMethod | None = None,
        fuse_wgrad_accumulation: bool = False,
        params_dtype: torch.dtype | None = None,
        return_layernorm_output: bool = False,
        return_layernorm_output_gathered: bool = False,
        seq_length: int | None = None,
        micro_batch_size: int | None = None,
        set_parallel_mode: bool = False,
        zero_centered_gamma: bool = False,
        device: torch.device | str | int | None = None,
        ub_overlap_ag: bool = False,
        name: str | None = None,
        ub_overlap_rs: bool = False,
        ub_overlap_rs_dgrad: bool = False,
        ub_bulk_dgrad: bool = False,
        ub_bulk_wgrad: bool = False,
        delay_wgrad_compute: bool = False,
        symmetric_ar_type: str | None = None,
        checkpoint: bool = False,
        *,
        recompute_norm_output: bool = False,
        save_preactivation: str | None = None,
        tp_recompute_allgather: bool = True,
        tp_overlap: str = "auto",
    ) -> None:
        super().__init__()
        self._build(
            ParallelConfig(
                sequence_parallel=sequence_parallel,
                tp_group=tp_group,
                tp_size=tp_size,
                tp_overlap=tp_overlap,
                tp_recompute_allgather=tp_recompute_allgather,
                symmetric_ar_type=symmetric_ar_type,
            ),
            ParameterConfig(
                params_dtype=params_dtype, device=device, get_rng_state_tracker=get_rng_state_tracker, name=name
            ),
            ProductConfig(
                fuse_wgrad_accumulation=fuse_wgrad_accumulation,
                delay_wgrad_compute=delay_wgrad_compute,
                bias=bias,
                return_bias=return_bias,
            ),
            prefixes=("fc2", "fc1"),
        )
        self.checkpoint = checkpoint
        self.recompute_norm_output = recompute_norm_output
        check_choice("LayerNormMLP", "save_preactivation", save_preactivation, (None, "fp8"))
        self.save_preactivation = save_preactivation
        self.hidden_size = hidden_size
        check_size("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        self.ffn_hidden_size = divided("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.activation = activation
        self.activation_params = activation_params
        self._activation_values = activation_parameters("LayerNormMLP", activation, activation_params)
        self.set_parallel_mode = set_parallel_mode
        norm = NormConfig(normalization=normalization, eps=eps, zero_centered_gamma=zero_centered_gamma)
        declare_norm(self, norm, hidden=hidden_size, hidden_name="hidden_size")
        fc1_rows = self.ffn_hidden_size * (2 if functional.activation_kinds[activation] else 1)
        check_function("LayerNormMLP", "init_method", init_method)
        check_function("LayerNormMLP", "output_layer_init_method", output_layer_init_method)
        column, row = self._modes()
        self._declare_product({"fc1_": fc1_rows}, hidden_size, init_method, column)
        self._declare_product({"fc2_": hidden_size}, self.ffn_hidden_size, output_layer_init_method, row)
        if not bias:
            self.fc1_bias = self.fc2_bias = None
        self.reset_parameters(defer_init=self.device.type == "meta")

    def _modes(self) -> tuple[str | None, ...]:
        return ("column", "row") if self.set_parallel_mode else (None, None)

    def _product_names(self, product: str) -> tuple[list[str], list[str]]:
        return [f"{product}_weight"], [f"{product}_bias"] if self.use_bias else []

    def forward(
        self,
        inp: torch.Tensor,
        is_first_microbatch: bool | None = None,
        *,
        residual: torch.Tensor | None = None,
    ) -> torch.Tensor | tuple[torch.Tensor | None, ...]:
        """Shapes: inp, residual [..., hidden_size] -> [..., hidden_size].

        residual (an extension of the common API): the MLP reads h = inp + residual, which the norm's kernel adds, and h
        is returned last.
        """
        if type(inp) is not torch.Tensor:
            check_tensor("LayerNormMLP", "inp", inp)
            inp = plain(inp)
        residual = plain(residual)
        runtime, first, quantization = self.runtime, is_first_microbatch, self.runtime.quantization
        fc2_bias = self.fc2_bias if self.apply_bias else None
        fc1_weight, fc2_weight = self.fc1_weight, self.fc2_weight
        fc1_mode, fc2_mode = self._modes()
        fc1 = runtime.call(self, "fc1", fc1_weight, inp, first, fc1_mode)
        fc2 = runtime.call(self, "fc2", fc2_weight, inp, first, fc2_mode)
        quantized = fc1["quantization"] is not None
        if not quantized:
            fc1_weight, fc2_weight = plain(fc1_weight), plain(fc2_weight)
        try:
            out, norm_output, h = functional.layernorm_mlp(
                inp,
                self.layer_norm_weight,
                self.layer_norm_bias,
                fc1_weight,
                self.fc1_bias,
                fc2_weight,
                fc2_bias,
                kind=self.activation,
                params=self._activation_values,
                residual=residual,
                return_output=self.return_layernorm_output or (not quantized and quantization.fp8_calibration),
                recompute_output=self.recompute_norm_output,
                recompute=self.checkpoint,
                fp8_pre_activation=self.save_preactivation == "fp8",
                grad_accumulators=(fc1["grad_accumulator"], fc2["grad_accumulator"]),
                quantizations=(fc1["quantization"], fc2["quantization"]),
                own_weights=(fc1["own_weight"], fc2["own_weight"]),
                tp_comms=(fc1["tp_comm"], fc2["tp_comm"]),
                **norm_options(self),
            )
        except ValueError as error:
            raise_for_module(error, "LayerNormMLP", inp, self.hidden_size, "fc1_weight", fc1_weight)
            raise
        if quantized:
            quantization.follow(out)
        elif quantization.fp8_calibration:
            self._calibrate_both(norm_output)
        return self._results(out, self.fc2_bias, norm_output, None if residual is None else h)

    @torch.no_grad()
    def _calibrate_both(self, norm_output: torch.Tensor) -> None:
        """Computes the activation, which is not saved, once more, for all tokens that the second product reads."""
        calibrate = self.runtime.quantization.calibrate
        weight = plain(self.fc1_weight)
        calibrate(0, norm_output, weight)
        tp_comm = tp_comm_of(self, self._modes()[0], norm_output)
        pre_activation = functional.linear(norm_output, weight, self.fc1_bias, tp_comm=tp_comm)
        activated = functional.activation(pre_activation, self.activation, self._activation_values)
        calibrate(1, activated, plain(self.fc2_weight))

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"normalization={self.normalization}, activation={self.activation}"
        )


@register_stacks(LayerNormMLP)
def _halves(module: LayerNormMLP) -> Iterator[Stack]:
    """The rows of the first product of a gated activation."""
    if functional.activation_kinds[module.activation]:
        yield Stack(module, ("fc1_weight", "fc1_bias"), {"gate": 1, "up": 1})
