"""MoEMLP: a mixture of experts in place of an MLP: router, permutation, grouped MLP, and the sum of each token's
results. The host never waits for the device."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Hashable, Mapping
from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch

from transformer_engine.pytorch import functional, permutation
from transformer_engine.pytorch._internal.arguments import check_number, check_size, check_tensor
from transformer_engine.pytorch._internal.recompute_phase import is_recomputed
from transformer_engine.pytorch.module.base import InitMethod, refuse
from transformer_engine.pytorch.module.composite import Composite
from transformer_engine.pytorch.module.group_splits import Splits
from transformer_engine.pytorch.module.submodules import calls_forward, has_no_global_hook
from transformer_engine.pytorch.moe.grouped_mlp import GroupedMLP
from transformer_engine.pytorch.moe.topk_router import Routing, RowsWanted, TopKRouter
from transformer_engine.pytorch.verdict import count_splits

ROWS = 128  # a capacity is a multiple of so many
_STASH_METHODS = ("pre_schedule", "group", "post_schedule")
_numbers = itertools.count()  # of groups of stashes


class Stash(Protocol):
    """The calls of MoEMLP on a stash such as te.stash.PagedStash."""

    def pre_schedule(self, x: torch.Tensor) -> torch.Tensor: ...

    def group(self, name: Hashable, *, tail: str) -> AbstractContextManager: ...

    def post_schedule(self, y: torch.Tensor) -> torch.Tensor: ...


def expert_range(op: str, experts: tuple[int, int] | None, num_experts: int) -> tuple[int, int]:
    """The argument `experts`, (first, last): all by default."""
    if experts is None:
        return 0, num_experts
    try:
        first, last = map(operator.index, experts)
    except (TypeError, ValueError):
        first, last = 0, 0
    if not 0 <= first < last <= num_experts:
        raise ValueError(
            f"{op}: argument 'experts' is {experts!r}, wanted integers (first, last) with 0 <= first < last <= "
            f"{num_experts}."
        )
    return first, last


class _Rows(NamedTuple):
    """Arguments of the experts, and the map of a permutation before them, by which each token's rows are added up after
    them."""

    inp: torch.Tensor
    probs: torch.Tensor
    splits: torch.Tensor | Splits
    options: dict[str, object]
    back: torch.Tensor | None = None


class MoEMLP(Composite):
    """y = sum over a token's topk experts e of prob_e * fc2_e(act(fc1_e(x))), and the loss that balances the experts.

    Parts: `router` (TopKRouter) and `experts` (GroupedMLP, with parameters `fc1.weight` and `fc2.weight` [experts,
    out_features, in_features]).
    forward(inp) returns (y, aux_loss): y has inp's shape and dtype, aux_loss is a float32 without dimensions.

    Each token's rows are copied into the order of the experts (as by te.moe_permute_with_probs) and added up again
    (te.moe_unpermute); the probabilities are the scale of the rows inside the experts. The numbers of rows stay on the
    device: `tokens_per_expert`, of the last call, has all experts.
    experts=(first, last): the experts that live here; rows of others are left out, and the results of disjoint ranges
    add up to those of the whole layer. Parameters of a strict range have the mark allreduce=False.
    capacity_factor: memory for round_up(capacity_factor * tokens * topk * (last - first) / num_experts, 128) rows, and
    no more than there can be; rows past it, of the last experts, are cut, and te.verdict.watch() reports them.
    None: as many as there can be.
    score_function, use_pre_softmax, num_groups, group_topk, scaling_factor, expert_bias, aux_loss_coeff: the router's;
    its logits are float32. activation, activation_params, save_preactivation and the options of weight gradients: the
    experts'. FP8 (te.autocast) is that of GroupedLinear, in the experts alone.
    Kept for the backward: the input, the pre-activation of all rows, their probabilities and the map of the rows. The
    rows themselves are gathered from the input again, to the same bits; keep_rows=True keeps them (in FP8 their
    panels), as do hooks or classes of a client in place of `router` or `experts`.
    stash: a te.stash.PagedStash, which keeps the live rows of all tensors that the experts save: the pre-activation,
    the probabilities, and the rows if they are kept; the module is one of its groups, between its schedulers.
    Not available in this version (NotImplementedError): ep_group, ep_transport.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        experts: tuple[int, int] | None = None,
        ep_group: object | None = None,
        ep_transport: str = "auto",
        capacity_factor: float | None = None,
        activation: str = "swiglu",
        activation_params: Mapping[str, float] | None = None,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        aux_loss_coeff: float = 0.0,
        keep_rows: bool = False,
        save_preactivation: str | None = None,
        fuse_wgrad_accumulation: bool = False,
        delay_wgrad_compute: bool = False,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        output_layer_init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        name: str | None = None,
        stash: Stash | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        refuse(op, "experts over ranks", ep_group=ep_group, ep_transport=ep_transport != "auto" and ep_transport)
        missing = [] if stash is None else [m for m in _STASH_METHODS if not callable(getattr(stash, m, None))]
        if missing:
            raise TypeError(
                f"{op}: argument 'stash' is a {type(stash).__name__} without {missing[0]}(), wanted a "
                "te.stash.PagedStash, or None."
            )
        self.stash, self.stash_group = stash, next(_numbers)
        check_size(op, "num_experts", num_experts, 1)
        check_size(op, "hidden_size", hidden_size, 1)
        check_size(op, "ffn_hidden_size", ffn_hidden_size)
        first, last = expert_range(op, experts, num_experts)
        if capacity_factor is not None:
            check_number(op, "capacity_factor", capacity_factor)
            if capacity_factor <= 0:
                raise ValueError(f"{op}: argument 'capacity_factor' is {capacity_factor}, wanted a number above 0.")
        self.hidden_size, self.num_experts, self.topk = hidden_size, num_experts, topk
        self.first_expert, self.last_expert, self.capacity_factor = first, last, capacity_factor
        self.keep_rows = keep_rows
        common = {
            "get_rng_state_tracker": get_rng_state_tracker,
            "rng_tracker_name": rng_tracker_name,
            "init_method": init_method,
            "params_dtype": params_dtype,
            "device": device,
        }
        part = "" if name is None else f"{name}."
        self.router = TopKRouter(
            hidden_size,
            num_experts,
            topk,
            score_function=score_function,
            use_pre_softmax=use_pre_softmax,
            num_groups=num_groups,
            group_topk=group_topk,
            scaling_factor=scaling_factor,
            expert_bias=expert_bias,
            aux_loss_coeff=aux_loss_coeff,
            name=f"{part}router",
            **common,
        )
        self.experts = GroupedMLP(
            last - first,
            hidden_size,
            ffn_hidden_size,
            activation=activation,
            activation_params=activation_params,
            save_preactivation=save_preactivation,
            fuse_wgrad_accumulation=fuse_wgrad_accumulation,
            delay_wgrad_compute=delay_wgrad_compute,
            output_layer_init_method=output_layer_init_method,
            name=f"{part}experts",
            **common,
        )
        if last - first < num_experts:
            for parameter in self.experts.parameters():
                parameter.allreduce = False
        counts = torch.zeros(num_experts, dtype=torch.int64, device=self.router.weight.device)
        self.register_buffer("tokens_per_expert", counts, persistent=False)

    def __setstate__(self, state: dict[str, object]) -> None:
        """A copy is a group of its own."""
        super().__setstate__(state)
        self.stash_group = next(_numbers)

    def forward(self, inp: torch.Tensor, is_first_microbatch: bool | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """inp: [..., hidden_size]. is_first_microbatch: as Linear's."""
        op = type(self).__name__
        if type(inp) is not torch.Tensor:
            check_tensor(op, "inp", inp)
        if inp.dim() == 0 or inp.shape[-1] != self.hidden_size:
            raise ValueError(f"{op}: argument 'inp' has shape {list(inp.shape)}, wanted [..., {self.hidden_size}].")
        parts = self._modules  # faster than the search of torch's __getattr__
        router, experts = parts["router"], parts["experts"]
        own = has_no_global_hook() and calls_forward(router, TopKRouter) and calls_forward(experts, GroupedMLP)
        counted = not is_recomputed()  # a recomputation's tokens and cut rows are those of an earlier call
        if own:
            tokens = inp if inp.dim() == 2 else inp.reshape(-1, self.hidden_size)
            routed, aux_loss = self._routed(router, tokens, counted)
            tokens = routed.inp
        else:
            tokens = inp.reshape(-1, self.hidden_size)  # where the gradients of both parts meet, before those of others
            routed = router(tokens)
            aux_loss = routed.aux_loss
        if self.stash is None:
            rows = routed if own else self._permuted(tokens, routed, counted)
            out = experts(rows.inp, rows.splits, rows.probs, is_first_microbatch, **rows.options)
        else:
            rows, out = self._stashed(self.stash, experts, tokens, routed, is_first_microbatch, counted)
        y = out if rows.back is None else functional.unpermute(out, rows.back, of_mask=True)
        return y if inp.dim() == 2 else y.view(inp.shape), aux_loss

    def _routed(self, router: TopKRouter, tokens: torch.Tensor, counted: bool) -> tuple[_Rows, torch.Tensor]:
        """The rows as a map, which the experts gather by; and the loss."""
        if tokens.is_cuda and not torch.compiler.is_compiling():
            count_splits(type(self).__name__, tokens.device)
        kept = self._buffers["tokens_per_expert"]
        into = kept if counted and kept.device == tokens.device else None
        experts = (self.first_expert, self.last_expert)
        routed = router(tokens, RowsWanted(experts, self._rows(tokens.shape[0]), counted, into))
        if counted and routed.tokens_per_expert is not None:
            self._keep_counts(routed.tokens_per_expert)
        options = {"row_map": routed.row_map, "keep_rows": self.keep_rows, "sum_rows": True, "zero_scale_tail": False}
        return _Rows(routed.tokens, routed.probs, Splits(offsets=routed.offsets), options), routed.aux_loss

    def _permuted(self, tokens: torch.Tensor, routing: Routing, counted: bool) -> _Rows:
        """Copies of the tokens by the routing map, which a client's router or hooks may have made."""
        local = slice(self.first_expert, self.last_expert)
        arguments = (tokens, routing.probs[:, local], routing.routing_map[:, local], self._rows(tokens.shape[0]))
        inp, probs, back = permutation.moe_permute_with_probs(*arguments)
        if counted:
            self._keep_counts(routing.tokens_per_expert)
        return _Rows(inp, probs, routing.tokens_per_expert[local], {}, back)

    def _stashed(
        self,
        stash: Stash,
        experts: torch.nn.Module,
        tokens: torch.Tensor,
        routed: _Rows | Routing,
        is_first_microbatch: bool | None,
        counted: bool,
    ) -> tuple[_Rows, torch.Tensor]:
        """The rows, and the experts' output, between the schedulers of the stash."""
        source = stash.pre_schedule(tokens)
        try:
            rows = routed if isinstance(routed, _Rows) else self._permuted(source, routed, counted)
            inp = source if rows is routed else rows.inp  # the rows' map gathers from the source
            # Nothing reads a row past the total, so a reload need not write there.
            with stash.group(self.stash_group, tail="keep"):
                out = experts(inp, rows.splits, rows.probs, is_first_microbatch, **rows.options)
        except BaseException:
            stash.post_schedule(tokens.detach())  # without a gradient it stores nothing, and the next call may begin
            raise
        return rows, stash.post_schedule(out)

    @torch.no_grad()
    def _keep_counts(self, counts: torch.Tensor) -> None:
        kept = self.tokens_per_expert
        if kept.device == counts.device:
            kept.copy_(counts)
        elif kept.is_meta:  # the parameters were assigned to a module on meta, which no state dict does for the counts
            with torch.inference_mode(False):  # later calls may have gradients
                self.tokens_per_expert = counts.clone()
        else:
            raise ValueError(
                f"{type(self).__name__}: buffer 'tokens_per_expert' is on {kept.device}, wanted {counts.device} like "
                "the router's results; move the module with .to(device)."
            )

    def _rows(self, tokens: int) -> int:
        """Of the experts' input: as many as there can be, or the capacity; without tokens one, which belongs to no
        expert."""
        local = self.last_expert - self.first_expert
        most = max(tokens * min(self.topk, local), 1)
        if self.capacity_factor is None:
            return most
        wanted = math.ceil(self.capacity_factor * tokens * self.topk * local / self.num_experts)
        return max(min(most, -(-wanted // ROWS) * ROWS), 1)

    def update_expert_bias(self, tokens_per_expert: torch.Tensor, rate: float) -> None:
        """As TopKRouter's."""
        self.router.update_expert_bias(tokens_per_expert, rate)

    def need_backward_dw(self) -> bool:
        """Whether weight gradients wait for backward_dw(): the option delay_wgrad_compute."""
        return self.experts.need_backward_dw()

    def backward_dw(self) -> None:
        """Computes the experts' weight gradients that the oldest backward() left."""
        self.experts.backward_dw()

    def reset_parameters(self, defer_init: bool = False) -> None:
        """As GroupedLinear's."""
        self.router.reset_parameters(defer_init)
        self.experts.reset_parameters(defer_init)
        if not defer_init and self.tokens_per_expert.is_meta:
            self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert, device=self.router.weight.device)

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, topk={self.topk}, experts=({self.first_expert}, {self.last_expert})"
