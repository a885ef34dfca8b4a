"""TopKRouter: scores every token for every expert and chooses the best ones. The formulas are those of router.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch

from transformer_engine.pytorch import functional, router
from transformer_engine.pytorch._internal.arguments import check_function, check_number, check_size, check_tensor
from transformer_engine.pytorch.functional.router import MAX_EXPERTS, MAX_TOPK
from transformer_engine.pytorch.module.base import InitMethod, TransformerEngineBaseModule, check_choice, default_init
from transformer_engine.pytorch.module.config import ParameterConfig


class Routing(NamedTuple):
    """probs: float32 [tokens, experts], 0 where an expert is not chosen. routing_map: bool of the same shape.
    tokens_per_expert: int64 [experts]. aux_loss: float32, without dimensions."""

    probs: torch.Tensor
    routing_map: torch.Tensor
    tokens_per_expert: torch.Tensor
    aux_loss: torch.Tensor


class RowsWanted(NamedTuple):
    """Arguments of functional.permute_routing: the experts whose rows are wanted, the number of rows, whether what is
    cut is counted, and memory for the tokens of every expert."""

    experts: tuple[int, int]
    rows: int
    count: bool
    counts: torch.Tensor | None


class RoutedRows(NamedTuple):
    """Results of functional.router_rows, the map as one tuple, and the loss. tokens_per_expert: None where they are in
    the caller's memory."""

    tokens: torch.Tensor
    probs: torch.Tensor
    row_map: tuple[torch.Tensor, torch.Tensor]
    offsets: torch.Tensor
    tokens_per_expert: torch.Tensor | None
    aux_loss: torch.Tensor


class TopKRouter(TransformerEngineBaseModule):
    """Logits x weight^T in float32, scores, the choice of topk experts for each token, and the loss that balances them.

    Parameter `weight` [num_experts, hidden_size] in params_dtype; with expert_bias a buffer `expert_bias` float32
    [num_experts], which chooses and has no gradient (update_expert_bias). Nothing is quantized.
    score_function, use_pre_softmax, num_groups, group_topk, scaling_factor: those of fused_topk_with_score_function
    (transformer_engine.pytorch.router).
    aux_loss_coeff: factor of router.fused_moe_aux_loss; 0: no loss is computed, and 0 is returned.
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        topk: int,
        *,
        score_function: str = "softmax",
        use_pre_softmax: bool = False,
        num_groups: int | None = None,
        group_topk: int | None = None,
        scaling_factor: float | None = None,
        expert_bias: bool = False,
        aux_loss_coeff: float = 0.0,
        get_rng_state_tracker: Callable | None = None,
        rng_tracker_name: str | None = None,
        init_method: InitMethod | None = None,
        params_dtype: torch.dtype | None = None,
        device: torch.device | str | int | None = None,
        name: str | None = None,
    ) -> None:
        super().__init__()
        op = type(self).__name__
        check_size(op, "hidden_size", hidden_size, 1)
        check_size(op, "num_experts", num_experts, 1)
        check_size(op, "topk", topk, 1)
        check_function(op, "init_method", init_method)
        check_choice(op, "score_function", score_function, ("softmax", "sigmoid", "sqrtsoftplus"))
        most = min(num_experts, MAX_TOPK)
        if topk > most or num_experts > MAX_EXPERTS:
            raise ValueError(
                f"{op}: arguments 'topk' and 'num_experts' are {topk} and {num_experts}, wanted at most {most} and at "
                f"most {MAX_EXPERTS}."
            )
        if expert_bias and score_function == "softmax":
            raise ValueError(
                f"{op}: argument 'expert_bias' is True with score_function='softmax', which has no bias; use 'sigmoid' "
                "or 'sqrtsoftplus'."
            )
        _check_groups(op, num_experts, topk, num_groups, group_topk)
        check_number(op, "aux_loss_coeff", aux_loss_coeff)
        if scaling_factor is not None:
            check_number(op, "scaling_factor", scaling_factor)
        self._setup(
            ParameterConfig(
                name=name,
                params_dtype=params_dtype,
                device=device,
                get_rng_state_tracker=get_rng_state_tracker,
                rng_tracker_name=rng_tracker_name,
            )
        )
        self.hidden_size, self.num_experts, self.topk = hidden_size, num_experts, topk
        self.score_function, self.use_pre_softmax = score_function, use_pre_softmax
        self.num_groups, self.group_topk, self.scaling_factor = num_groups, group_topk, scaling_factor
        self.aux_loss_coeff = aux_loss_coeff
        self._declare("weight", (num_experts, hidden_size), init_method or default_init)
        bias = torch.zeros(num_experts, dtype=torch.float32, device=self.device) if expert_bias else None
        self.register_buffer("expert_bias", bias)
        self.reset_parameters(defer_init=self.device.type == "meta")

    def forward(self, inp: torch.Tensor, rows: RowsWanted | None = None) -> Routing | RoutedRows:
        """inp: [tokens, hidden_size]. rows: the choice is returned as a map by rows, in place of a Routing."""
        if type(inp) is not torch.Tensor:
            check_tensor(type(self).__name__, "inp", inp)
        if inp.dim() != 2 or inp.shape[1] != self.hidden_size:
            raise ValueError(
                f"{type(self).__name__}: argument 'inp' has shape {list(inp.shape)}, wanted [tokens, "
                f"{self.hidden_size}]."
            )
        weight = self._parameters.get("weight")  # faster than the search of torch's __getattr__
        if weight is None:  # a parametrization computes it
            weight = self.weight
        bias = self._buffers.get("expert_bias", False)
        if bias is False:  # it is a parameter or a plain attribute
            bias = self.expert_bias
        grouped = self.group_topk is not None
        choice = {
            "pre_softmax": self.use_pre_softmax,
            "num_groups": self.num_groups if grouped else 0,
            "group_topk": self.group_topk if grouped else 0,
            "scaling_factor": 1.0 if self.scaling_factor is None else self.scaling_factor,
            "score_function": self.score_function,
            "expert_bias": bias,
        }
        if rows is not None:
            return self._rows(inp, weight, rows, choice)
        logits = functional.router_logits(inp, weight)
        probs, routing_map, _ = functional.router_topk(logits, self.topk, **choice)
        tokens_per_expert = routing_map.sum(0)
        return Routing(probs, routing_map, tokens_per_expert, self._aux_loss(logits, tokens_per_expert))

    def _rows(
        self, inp: torch.Tensor, weight: torch.Tensor, wanted: RowsWanted, choice: dict[str, object]
    ) -> RoutedRows:
        has_loss = self.aux_loss_coeff != 0
        into = None if has_loss else wanted.counts  # the loss saves the counts, and the next call writes there
        no_loss = None if has_loss else inp.new_empty((), dtype=torch.float32)
        tokens, probs, token_of_row, row_of_pair, offsets, counts, logits = functional.router_rows(
            inp,
            weight,
            self.topk,
            wanted.experts,
            wanted.rows,
            count=wanted.count,
            counts=into,
            with_logits=has_loss,
            zero=no_loss,
            **choice,
        )
        loss = self._aux_loss(logits, counts) if has_loss else no_loss
        return RoutedRows(tokens, probs, (token_of_row, row_of_pair), offsets, counts if into is None else None, loss)

    def _aux_loss(self, logits: torch.Tensor, tokens_per_expert: torch.Tensor) -> torch.Tensor:
        if self.aux_loss_coeff == 0:
            return logits.new_zeros(())
        _, scores = router.fused_compute_score_for_moe_aux_loss(
            logits=logits, topk=self.topk, score_function=self.score_function
        )
        return router.fused_moe_aux_loss(
            probs=scores,
            tokens_per_expert=tokens_per_expert,
            total_num_tokens=logits.shape[0],
            num_experts=self.num_experts,
            topk=self.topk,
            coeff=self.aux_loss_coeff,
        )

    @torch.no_grad()
    def update_expert_bias(self, tokens_per_expert: torch.Tensor, rate: float) -> None:
        """Adds rate to the bias of each expert with fewer tokens than the mean, and subtracts it from that of one with
        more. tokens_per_expert: of a step, summed over the ranks by the caller."""
        op = type(self).__name__
        if self.expert_bias is None:
            raise ValueError(f"{op}: update_expert_bias() needs a bias; build the module with expert_bias=True.")
        check_tensor(op, "tokens_per_expert", tokens_per_expert)
        check_number(op, "rate", rate)
        if tuple(tokens_per_expert.shape) != (self.num_experts,):
            raise ValueError(
                f"{op}: argument 'tokens_per_expert' has shape {list(tokens_per_expert.shape)}, wanted "
                f"[{self.num_experts}]."
            )
        if tokens_per_expert.device != self.expert_bias.device:
            raise ValueError(
                f"{op}: argument 'tokens_per_expert' is on {tokens_per_expert.device}, wanted "
                f"{self.expert_bias.device} like the bias; move it with .to(device)."
            )
        # Exact, as a rounded mean would move the bias of an expert that has the mean.
        tokens = tokens_per_expert.to(torch.float64 if tokens_per_expert.is_floating_point() else torch.int64)
        below = (tokens.sum() - tokens * self.num_experts).sign()
        self.expert_bias.add_(below.to(self.expert_bias.dtype), alpha=rate)

    def _initialize(self) -> None:
        super()._initialize()
        if self.expert_bias is not None:
            self.expert_bias = torch.zeros(self.num_experts, dtype=torch.float32, device=self.weight.device)

    def _apply(self, fn, recurse=True):
        """A cast of the module leaves the bias in float32."""
        before = self.expert_bias
        super()._apply(fn, recurse)
        if before is not None and self.expert_bias.dtype != before.dtype:
            self.expert_bias = before.to(self.expert_bias.device)
        return self

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, topk={self.topk}, score_function={self.score_function}"


def _check_groups(op: str, experts: int, topk: int, num_groups: int | None, group_topk: int | None) -> None:
    """The same limits as the function's, at construction."""
    if num_groups is not None:
        check_size(op, "num_groups", num_groups, 1)
    if group_topk is None:  # num_groups has no effect
        return
    check_size(op, "group_topk", group_topk, 1)
    if num_groups is None:
        raise ValueError(
            f"{op}: argument 'num_groups' is None, wanted the number of groups of which group_topk = {group_topk} stay."
        )
    if experts % num_groups:
        raise ValueError(f"{op}: argument 'num_groups' is {num_groups}, wanted a divisor of the {experts} experts.")
    if group_topk > num_groups or topk % group_topk or topk // group_topk > experts // num_groups:
        raise ValueError(
            f"{op}: argument 'group_topk' is {group_topk}, wanted a divisor of topk = {topk}, at most num_groups = "
            f"{num_groups}, with at most the {experts // num_groups} experts of a group from each."
        )
