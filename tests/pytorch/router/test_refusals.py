"""Refusals of the router: each error names op, argument, the given value and the wanted one."""

import pytest
import torch
from support import refused

from transformer_engine.pytorch import functional
from transformer_engine.pytorch.router import (
    QBHistogramMode,
    RoutingMapFormat,
    fused_compute_score_for_moe_aux_loss,
    fused_moe_aux_loss,
    fused_topk_with_score_function,
)

GOOD = {
    "topk": 4,
    "use_pre_softmax": False,
    "num_groups": None,
    "group_topk": None,
    "scaling_factor": None,
    "score_function": "sigmoid",
    "expert_bias": None,
}

LOSS = {"probs": torch.zeros(3, 12), "tokens_per_expert": torch.zeros(12), "total_num_tokens": 3}
LOSS |= {"num_experts": 12, "topk": 4, "coeff": 0.1}

# arguments -> the argument that is named, and the wanted value
BAD_CHOICES = (
    ({"topk": 0}, "'topk' is 0", "1 to 12"),
    ({"topk": 13}, "'topk' is 13", "1 to 12"),
    ({"topk": -1}, "'topk' is -1", "1 to 12"),
    ({"num_groups": 5, "group_topk": 1}, "'num_groups' is 5", "a divisor of the 12 experts"),
    ({"num_groups": 4, "group_topk": 3}, "'group_topk' is 3", "a divisor of topk = 4"),
    ({"num_groups": 2, "group_topk": 4}, "'group_topk' is 4", "num_groups = 2"),
    ({"num_groups": 4, "group_topk": 0}, "'group_topk' is 0", "from 1 to num_groups = 4"),
    ({"num_groups": 6, "group_topk": 1}, "'group_topk' is 1", "a group gives 4 of its 2 experts"),
    ({"num_groups": None, "group_topk": 2}, "'num_groups' is None", "group_topk = 2"),
    ({"score_function": "tanh"}, "'score_function' is 'tanh'", "softmax, sigmoid or sqrtsoftplus"),
    ({"score_function": "softmax", "expert_bias": torch.zeros(12)}, "'expert_bias' is given", "sigmoid or"),
    ({"expert_bias": torch.zeros(12, dtype=torch.float64)}, "'expert_bias' has dtype Double", "float32"),
    ({"expert_bias": torch.zeros(12, dtype=torch.int64)}, "'expert_bias' has dtype Long", "float32"),
    ({"expert_bias": torch.zeros(11)}, "'expert_bias' has shape [11]", "[12]"),
    ({"expert_bias": torch.zeros(1, 12)}, "'expert_bias' has shape [1, 12]", "[12]"),
    ({"expert_bias": torch.zeros(12, device="meta")}, "'expert_bias' is on meta", "like the logits"),
    ({"routing_map_format": "BYTEMAP"}, "'routing_map_format' is 'BYTEMAP'", "RoutingMapFormat.BYTEMAP"),
    ({"routing_map_format": None}, "'routing_map_format' is None", "RoutingMapFormat.BITMAP_U8"),
    (
        {"routing_map_format": RoutingMapFormat.BITMAP_U8, "topk_indices": torch.zeros(3, 4, dtype=torch.int32)},
        "'routing_map_format' is RoutingMapFormat.BITMAP_U8",
        "topk_indices",
    ),
    ({"topk_indices": torch.zeros(3, 4)}, "'topk_indices' is torch.float32", "int16, int32 or int64"),
    ({"topk_indices": torch.zeros(3, 5, dtype=torch.int32)}, "of shape (3, 5)", "of shape (3, 4)"),
    ({"topk_indices": torch.zeros(12, dtype=torch.int32)}, "of shape (12,)", "of shape (3, 4)"),
)


@pytest.mark.parametrize("given, named, wanted", BAD_CHOICES, ids=[named for _, named, _ in BAD_CHOICES])
def test_bad_choices(device, given, named, wanted):
    given = {k: v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for k, v in given.items()}
    for recorded in (False, True):
        with refused(ValueError, "topk", named, wanted):
            fused_topk_with_score_function(torch.zeros(3, 12, device=device, requires_grad=recorded), **GOOD | given)


@pytest.mark.parametrize(
    "logits, named",
    (
        (torch.zeros(3, 12, dtype=torch.float64), "has dtype Double"),
        (torch.zeros(3, 12, dtype=torch.int32), "has dtype Int"),
        (torch.zeros(3, 1025), "wanted 1 to 1024 experts"),
        (torch.zeros(3, 0), "wanted 1 to 1024 experts"),
        (torch.zeros(()), "has no dimensions"),
    ),
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_logits(device, logits, named):
    logits = logits.to(device)
    with refused(ValueError, "fused_topk_with_score_function: argument 'logits'", named):
        fused_topk_with_score_function(logits, **GOOD)
    with refused(ValueError, "fused_compute_score_for_moe_aux_loss: argument 'logits'", named):
        fused_compute_score_for_moe_aux_loss(logits, 4, "softmax")


def test_more_than_32_experts_a_token(device):
    with refused(ValueError, "fused_topk_with_score_function: argument 'topk' is 33", "1 to 32"):
        fused_topk_with_score_function(torch.zeros(3, 64, device=device), **GOOD | {"topk": 33})
    with refused(ValueError, "fused_compute_score_for_moe_aux_loss: argument 'topk' is 33", "1 to 32"):
        fused_compute_score_for_moe_aux_loss(torch.zeros(3, 64, device=device), 33, "softmax")


def test_bad_scores(device):
    logits = torch.zeros(3, 12, device=device)
    with refused(
        ValueError, "fused_compute_score_for_moe_aux_loss: argument 'score_function' is 'relu'", "sqrtsoftplus"
    ):
        fused_compute_score_for_moe_aux_loss(logits, 4, "relu")
    with refused(ValueError, "fused_compute_score_for_moe_aux_loss: argument 'routing_map_format' is 1"):
        fused_compute_score_for_moe_aux_loss(logits, 4, "softmax", 1)
    with refused(ValueError, "router_topk: argument 'map_format' is 'words'", "bytes, bits or none"):
        functional.router_topk(logits, 4, map_format="words")


@pytest.mark.parametrize("name", ("qb_histogram", "qb_bin_bounds", "qb_histogram_mode"))
def test_histograms_are_not_there(device, name):
    assert not list(QBHistogramMode)
    with refused(NotImplementedError, "fused_topk_with_score_function", f"'{name}'", "pass None"):
        fused_topk_with_score_function(torch.zeros(3, 12, device=device), **GOOD, **{name: torch.zeros(4)})


BAD_LOSSES = (
    ({"num_experts": 5}, "'num_experts' is 5", "a divisor of the last dimension of probs, 12"),
    ({"num_experts": 0}, "'num_experts' is 0", "a divisor"),
    ({"topk": 0}, "'topk' is 0", "1 to 12"),
    ({"topk": 13}, "'topk' is 13", "1 to 12"),
    ({"total_num_tokens": -1}, "'total_num_tokens' is -1", "at least 0"),
    ({"total_num_tokens": torch.tensor(3, dtype=torch.int32)}, "'total_num_tokens' is Int", "one int64"),
    ({"total_num_tokens": torch.tensor([3, 3])}, "'total_num_tokens' is Long of shape [2]", "one int64"),
    ({"total_num_tokens": torch.tensor(3, device="meta")}, "on meta", "one int64"),
    ({"tokens_per_expert": torch.zeros(11)}, "'tokens_per_expert' has shape [11]", "[12]"),
    ({"tokens_per_expert": torch.zeros(12, 1)}, "'tokens_per_expert' has shape [12, 1]", "[12]"),
    ({"tokens_per_expert": torch.zeros(12, dtype=torch.int16)}, "has dtype Short", "int32, int64"),
    ({"tokens_per_expert": torch.zeros(12, device="meta")}, "'tokens_per_expert' is on meta", "like probs"),
    ({"probs": torch.zeros(3, 12, dtype=torch.float64)}, "'probs' has dtype Double", "float32"),
    ({"probs": torch.zeros(())}, "'probs' has no dimensions", "[..., experts]"),
)


@pytest.mark.parametrize("given, named, wanted", BAD_LOSSES, ids=[named for _, named, _ in BAD_LOSSES])
def test_bad_losses(device, given, named, wanted):
    given = LOSS | given
    given = {k: v.to(device) if isinstance(v, torch.Tensor) and not v.is_meta else v for k, v in given.items()}
    with refused(ValueError, "fused_moe_aux_loss: argument", named, wanted):
        fused_moe_aux_loss(**given)


SCORE = {"topk": 4, "score_function": "softmax"}
FUNCTIONS = {  # with good arguments, and values of a wrong type for each of them
    fused_topk_with_score_function: (
        {"logits": torch.zeros(3, 12)} | GOOD,
        {
            "logits": [[0.0]],
            "topk": "2",
            "num_groups": 2.0,
            "group_topk": "1",
            "scaling_factor": "1",
            "score_function": 3,
            "expert_bias": [0.0],
            "topk_indices": [1],
        },
    ),
    fused_compute_score_for_moe_aux_loss: (
        {"logits": torch.zeros(3, 12)} | SCORE,
        {"logits": None, "topk": None, "score_function": None},
    ),
    fused_moe_aux_loss: (
        LOSS,
        {
            "probs": [0.0],
            "tokens_per_expert": [1],
            "total_num_tokens": 3.5,
            "num_experts": "12",
            "topk": None,
            "coeff": "0.1",
        },
    ),
}
WRONG = [(function, name) for function, (_, wrong) in FUNCTIONS.items() for name in wrong]


@pytest.mark.parametrize("function, name", WRONG, ids=[f"{f.__name__}-{name}" for f, name in WRONG])
def test_types(device, function, name):
    """A named error of one line: no list of the extension's signatures."""
    good, wrong = FUNCTIONS[function]
    given = {k: v.to(device) if isinstance(v, torch.Tensor) else v for k, v in good.items()} | {name: wrong[name]}
    with pytest.raises((TypeError, ValueError)) as error:
        function(**given)
    text = str(error.value)
    assert text.startswith(f"{function.__name__}: argument '{name}' is ") and "wanted" in text and "\n" not in text


def test_bad_operands_of_the_backward_ops(device):
    """Only a direct call of an op can pass these; nothing is read beyond a tensor."""
    ops, logits = torch.ops.te, torch.zeros(3, 12, device=device)
    chosen = torch.zeros(3, 4, dtype=torch.int32, device=device)

    def backward(dprobs=logits, chosen=chosen):
        return ops.router_topk_bwd(dprobs, logits, chosen, 4, False, 1.0, "softmax")

    with refused(ValueError, "router_topk: argument 'dprobs' is Float of shape [3, 11]", "[3, 12]"):
        backward(dprobs=logits[:, 1:])
    with refused(ValueError, "router_topk: argument 'chosen' is Long", "int32 of shape [3, 4]"):
        backward(chosen=chosen.long())
    with refused(ValueError, "router_topk: argument 'chosen' is Int of shape [3, 3]"):
        backward(chosen=chosen[:, 1:])
    with refused(ValueError, "router_scores: argument 'dscores' is Half", "Float"):
        ops.router_scores_bwd(logits.half(), logits, "softmax")
    if device == "cpu":
        for bad in (-1, 12):
            with refused(ValueError, f"te_router_backward: argument 'chosen' is {bad} in row 0", "0 to 11"):
                backward(chosen=torch.full_like(chosen, bad))
    else:
        assert not backward(chosen=torch.full_like(chosen, 12)).any()
