"""LayerNormMLP: norm, first product, activation, second product, in one autograd node. The activation is not kept."""

from collections.abc import Callable, Iterator, Mapping

import torch

from transformer_engine.pytorch import functional
from transformer_engine.pytorch._arguments import check_function, check_size, check_tensor
from transformer_engine.pytorch._keywords import tells_keywords
from transformer_engine.pytorch.distributed.stacked import Stack, tells_stacks
from transformer_engine.pytorch.module.base import InitMethod, check_choice, default_init
from transformer_engine.pytorch.module.norm_parameters import NormParameters
from transformer_engine.pytorch.module.parallel import TensorParallel, divided
from transformer_engine.pytorch.module.retelling import retell

_LOCAL = (None, None)  # exchanges
_CLAMPED = {"limit": 7.0, "alpha": 1.702, "glu_linear_offset": 1.0}


def activation_parameters(op: str, activation: str, params: Mapping[str, float] | None) -> tuple[float, ...]:
    """activation_params as functional.activation takes them; only clamped_swiglu has any."""
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


class LayerNormMLP(TensorParallel, NormParameters):
    """y = act(norm(x) fc1^T + fc1_bias) fc2^T + fc2_bias.

    Parameters `layer_norm_weight/_bias`, `fc1_weight/_bias` (twice as wide for gated activations, the half that the
    activation acts on first), `fc2_weight/_bias`. Kept for backward: the norm's input, statistics and output, and the
    pre-activation; with checkpoint the norm's input alone, and everything up to the activation is computed again in
    backward, to the same bits; with recompute_norm_output (ours beyond the common API) all but the norm's output.
    save_preactivation="fp8" (ours too): the pre-activation is kept as E4M3 with a power-of-two scale for each 128 of a
    row, half the memory; the backward takes the activation and its derivative of those values.
    Returns y, then fc2_bias with return_bias, then the norm's output with return_layernorm_output
    (return_layernorm_output_gathered as LayerNormLinear's).
    fuse_wgrad_accumulation and delay_wgrad_compute as in Linear.
    """

    _products = ("fc1", "fc2")

    @tells_keywords()
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
        self._setup_parallel(
            tp_group=tp_group,
            tp_size=tp_size,
            sequence_parallel=sequence_parallel,
            tp_recompute_allgather=tp_recompute_allgather,
            tp_overlap=tp_overlap,
            symmetric_ar_type=symmetric_ar_type,
        )
        self._setup(params_dtype=params_dtype, device=device, get_rng_state_tracker=get_rng_state_tracker, name=name)
        self._setup_wgrad("fc2", "fc1", fuse=fuse_wgrad_accumulation, delay=delay_wgrad_compute)
        self.checkpoint = checkpoint
        self.recompute_norm_output = recompute_norm_output
        check_choice("LayerNormMLP", "save_preactivation", save_preactivation, (None, "fp8"))
        self.save_preactivation = save_preactivation
        self.hidden_size = hidden_size
        check_size("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size)
        ffn_hidden_size = divided("LayerNormMLP", "ffn_hidden_size", ffn_hidden_size, self.tp_size)
        self.ffn_hidden_size = ffn_hidden_size
        self.use_bias = bias
        self.return_bias = return_bias
        self.apply_bias = bias and not return_bias
        self.return_layernorm_output = return_layernorm_output
        self.return_layernorm_output_gathered = return_layernorm_output_gathered
        self.activation = activation
        self.activation_params = activation_params
        self._activation_values = activation_parameters("LayerNormMLP", activation, activation_params)
        self.set_parallel_mode = set_parallel_mode
        self._declare_norm(
            "LayerNormMLP",
            hidden_size,
            "hidden_size",
            normalization=normalization,
            eps=eps,
            zero_centered=zero_centered_gamma,
        )
        fc1_rows = ffn_hidden_size * (2 if functional.activation_kinds[activation] else 1)
        check_function("LayerNormMLP", "init_method", init_method)
        check_function("LayerNormMLP", "output_layer_init_method", output_layer_init_method)
        self._declare_product("fc1", fc1_rows, hidden_size, init_method, partition_dim=0)
        self._declare_product("fc2", hidden_size, ffn_hidden_size, output_layer_init_method, partition_dim=1)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def _declare_product(
        self, prefix: str, rows: int, cols: int, init: InitMethod | None, *, partition_dim: int
    ) -> None:
        parallel = self.set_parallel_mode
        self._declare(
            f"{prefix}_weight",
            (rows, cols),
            init or default_init,
            tensor_model_parallel=parallel,
            partition_dim=partition_dim if parallel else -1,
            partition_stride=1,
            **self._product_tags(),
        )
        if self.use_bias:
            column = parallel and partition_dim == 0
            on_row = {"sequence_parallel": self.sequence_parallel} if parallel and partition_dim == 1 else {}
            self._declare(
                f"{prefix}_bias",
                (rows,),
                torch.nn.init.zeros_,
                tensor_model_parallel=column,
                partition_dim=0 if column else -1,
                partition_stride=1,
                **on_row,
                **self._product_tags(),
            )
        else:
            setattr(self, f"{prefix}_bias", None)

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

        residual (ours beyond the common API): the MLP is taken of h = inp + residual, added inside the norm's kernel,
        and h is returned last.
        """
        if type(inp) is not torch.Tensor:
            check_tensor("LayerNormMLP", "inp", inp)
            inp = self._plain(inp)
        residual = self._plain(residual)
        fc1_sink, fc2_sink = self._sink("fc1", is_first_microbatch), self._sink("fc2", is_first_microbatch)
        fc2_bias = self.fc2_bias if self.apply_bias else None
        fc1_weight, fc2_weight = self.fc1_weight, self.fc2_weight
        fc1, fc1_own = self._quantized_product("fc1", fc1_weight, is_first_microbatch)
        fc2, fc2_own = self._quantized_product("fc2", fc2_weight, is_first_microbatch)
        if fc1 is None:
            fc1_weight, fc2_weight = self._plain(fc1_weight), self._plain(fc2_weight)
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
                return_output=self.return_layernorm_output or (fc1 is None and self.fp8_calibration),
                recompute_output=self.recompute_norm_output,
                recompute=self.checkpoint,
                fp8_pre_activation=self.save_preactivation == "fp8",
                sinks=(fc1_sink, fc2_sink),
                quantizations=(fc1, fc2),
                own_weights=(fc1_own, fc2_own),
                exchanges=_LOCAL if self.tp_size == 1 else tuple(self._exchange(mode, inp) for mode in self._modes()),
                **self._norm_options(),
            )
        except ValueError as error:
            retell(error, "LayerNormMLP", inp, self.hidden_size, "fc1_weight", fc1_weight)
            raise
        if fc1 is not None:
            self._follow(out)
        elif self.fp8_calibration:
            self._calibrate_both(norm_output)
        return self._results(out, norm_output, None if residual is None else h)

    @torch.no_grad()
    def _calibrate_both(self, norm_output: torch.Tensor) -> None:
        """The activation, which is not kept, is computed once more, of all the tokens that the second product reads."""
        weight = self._plain(self.fc1_weight)
        self._calibrate("fc1", norm_output, weight)
        exchange = self._exchange(self._modes()[0], norm_output)
        pre_activation = functional.linear(norm_output, weight, self.fc1_bias, exchange=exchange)
        activated = functional.activation(pre_activation, self.activation, self._activation_values)
        self._calibrate("fc2", activated, self._plain(self.fc2_weight))

    def _results(self, out: torch.Tensor, norm_output: torch.Tensor, h: torch.Tensor | None):
        results = [out]
        if self.return_bias:
            results.append(self.fc2_bias)
        if self.return_layernorm_output:
            gathers = self.return_layernorm_output_gathered and self.set_parallel_mode
            results.append(self._gathered(norm_output) if gathers else norm_output)
        if h is not None:
            results.append(h)
        return tuple(results) if len(results) > 1 else out

    def extra_repr(self) -> str:
        return (
            f"hidden_size={self.hidden_size}, ffn_hidden_size={self.ffn_hidden_size}, bias={self.use_bias}, "
            f"normalization={self.normalization}, activation={self.activation}"
        )


@tells_stacks(LayerNormMLP)
def _halves(module: LayerNormMLP) -> Iterator[Stack]:
    """The first product's, of a gated activation."""
    if functional.activation_kinds[module.activation]:
        yield Stack(module, ("fc1_weight", "fc1_bias"), {"gate": 1, "up": 1})
