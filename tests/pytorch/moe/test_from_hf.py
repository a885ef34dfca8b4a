# moe_state_from_hf: a MoEMLP with the weights of a Mixtral or a Qwen3-MoE layer computes that layer.
import pytest
import torch
from support import randn, refused

from transformer_engine.pytorch.moe import MoEMLP, moe_state_from_hf

HIDDEN, FFN, EXPERTS, TOPK = 32, 48, 4, 2
PROJECTIONS = {"Mixtral": ("w1", "w3", "w2"), "Qwen3-MoE": ("gate_proj", "up_proj", "down_proj")}


def layer_of(model, prefix, device):
    """A state dict of the model's layer, and another tensor."""
    gate, up, down = PROJECTIONS[model]
    state = {f"{prefix}gate.weight": randn(EXPERTS, HIDDEN, device=device), "norm.weight": torch.ones(HIDDEN)}
    for i in range(EXPERTS):
        for name, shape in ((gate, (FFN, HIDDEN)), (up, (FFN, HIDDEN)), (down, (HIDDEN, FFN))):
            state[f"{prefix}experts.{i}.{name}.weight"] = randn(*shape, device=device, scale=0.2)
    return state


def models_layer(model, state, prefix, x):
    """As the models compute it: softmax over all experts, the best ones, divided by their sum."""
    gate, up, down = (
        [state[f"{prefix}experts.{i}.{name}.weight"].double() for i in range(EXPERTS)] for name in PROJECTIONS[model]
    )
    scores = (x.double() @ state[f"{prefix}gate.weight"].double().T).softmax(-1)
    best = scores.topk(TOPK)
    factors = torch.zeros_like(scores).scatter(-1, best.indices, best.values / best.values.sum(-1, keepdim=True))
    return sum(
        factors[:, i, None] * ((torch.nn.functional.silu(x.double() @ gate[i].T) * (x.double() @ up[i].T)) @ down[i].T)
        for i in range(EXPERTS)
    )


@pytest.mark.parametrize("prefix", ["", "model.layers.0.mlp."])
@pytest.mark.parametrize("model", PROJECTIONS)
def test_computes_the_models_layer(model, prefix, device):
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    state = layer_of(model, prefix, device)
    x = randn(20, HIDDEN, device=device)
    want = models_layer(model, state, prefix, x)
    parts = []
    for experts in (None, (0, 1), (1, 4)):
        ours = MoEMLP(HIDDEN, FFN, EXPERTS, TOPK, experts=experts, params_dtype=dtype, device=device)
        ours.load_state_dict(moe_state_from_hf(state, prefix, experts))
        parts.append(ours(x.to(dtype))[0].double())
    unit = 2.0**-22 if dtype is torch.float32 else 2.0**-7
    for got in (parts[0], parts[1] + parts[2]):  # six roundings of operands and results, which add up by their squares
        assert (got - want).norm() <= 16 * unit * want.norm()


def stacked(state, prefix):
    """As transformers 5 holds it."""
    gate, up, down = (
        torch.stack([state[f"{prefix}experts.{i}.{name}.weight"] for i in range(EXPERTS)])
        for name in PROJECTIONS["Qwen3-MoE"]
    )
    return {
        f"{prefix}gate.weight": state[f"{prefix}gate.weight"],
        f"{prefix}experts.gate_up_proj": torch.cat([gate, up], 1),
        f"{prefix}experts.down_proj": down,
    }


@pytest.mark.parametrize("experts", [None, (1, 3)])
def test_tensors_of_all_experts_are_taken_as_they_are(experts, device):
    state = layer_of("Qwen3-MoE", "mlp.", device)
    together = stacked(state, "mlp.")
    got, want = moe_state_from_hf(together, "mlp.", experts), moe_state_from_hf(state, "mlp.", experts)
    assert got.keys() == want.keys()
    first = 0 if experts is None else experts[0]
    for name, key in (("fc1", "gate_up_proj"), ("fc2", "down_proj")):
        assert torch.equal(got[f"experts.{name}.weight"], want[f"experts.{name}.weight"])
        assert got[f"experts.{name}.weight"].data_ptr() == together[f"mlp.experts.{key}"][first].data_ptr()


@pytest.mark.parametrize("model", ["mixtral", "qwen3_moe"])
def test_computes_the_layers_of_transformers(model):
    pytest.importorskip("transformers", minversion="5.0")
    if model == "mixtral":
        from transformers.models.mixtral.modeling_mixtral import MixtralConfig as Config
        from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock as Layer
    else:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeConfig as Config
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock as Layer
    sizes = {"num_local_experts": EXPERTS, "num_experts": EXPERTS, "num_experts_per_tok": TOPK, "norm_topk_prob": True}
    layer = Layer(Config(hidden_size=HIDDEN, intermediate_size=FFN, moe_intermediate_size=FFN, **sizes))
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(randn(*p.shape, scale=0.2))
    ours = MoEMLP(HIDDEN, FFN, EXPERTS, TOPK, params_dtype=torch.float32, device="cpu")
    ours.load_state_dict(moe_state_from_hf(layer.state_dict()))
    x = randn(2, 10, HIDDEN)
    want = layer(x)
    want = want[0] if isinstance(want, tuple) else want
    assert (ours(x)[0] - want).norm() <= 1e-5 * want.norm()


def test_tensors_of_other_layouts_are_refused():
    together = stacked(layer_of("Qwen3-MoE", "", "cpu"), "")
    for name, wanted in (
        ("experts.gate_up_proj", [EXPERTS, 2 * FFN, HIDDEN]),
        ("experts.down_proj", [EXPERTS, HIDDEN, FFN]),
    ):
        for wrong in (together[name].mT, together[name][1:], together[name][0]):
            if name == "experts.down_proj" and wrong.dim() == 3 and wrong.shape[0] == EXPERTS:
                continue  # then the other one does not fit
            with refused(ValueError, "moe_state_from_hf", f"{name} has shape {list(wrong.shape)}", f"wanted {wanted}"):
                moe_state_from_hf(together | {name: wrong})
    with refused(ValueError, "moe_state_from_hf", "experts.gate_up_proj", f"wanted [{EXPERTS}, {2 * HIDDEN}"):
        moe_state_from_hf(together | {"experts.down_proj": together["experts.down_proj"].mT})
    with refused(KeyError, "experts.down_proj"):
        moe_state_from_hf({name: t for name, t in together.items() if "down" not in name})
    with refused(ValueError, "moe_state_from_hf", "'experts'", "(0, 9)"):
        moe_state_from_hf(together, experts=(0, 9))


@pytest.mark.parametrize("name", ["experts.2.w1.weight", "experts.2.w3.weight", "experts.2.w2.weight"])
def test_experts_of_other_shapes_are_refused(name):
    state = layer_of("Mixtral", "", "cpu")
    state[name] = state[name][1:]
    with refused(ValueError, "moe_state_from_hf", f"{name} has shape {list(state[name].shape)}", "experts.0.w"):
        moe_state_from_hf(state)


def test_other_layers_are_refused():
    with refused(ValueError, "moe_state_from_hf", "Mixtral", "'mlp.'", "mlp.experts.0.w1.weight"):
        moe_state_from_hf({"mlp.up_proj.weight": torch.ones(1)}, "mlp.")
    for missing in ("experts.1.w2.weight", "experts.3.w1.weight", "experts.0.w1.weight", "gate.weight"):
        state = layer_of("Mixtral", "", "cpu")
        del state[missing]
        with refused(KeyError, missing):
            moe_state_from_hf(state)


@pytest.mark.parametrize("experts", [(0, 5), (-1, 2), (2, 2), (3, 1), (0.0, 2.0), "13", 3])
def test_ranges_of_other_experts_are_refused(experts):
    with refused(ValueError, "moe_state_from_hf", "'experts'", repr(experts), "<= 4"):
        moe_state_from_hf(layer_of("Qwen3-MoE", "mlp.", "cpu"), "mlp.", experts)


def test_a_router_of_other_experts_is_refused():
    state = layer_of("Mixtral", "", "cpu")
    state["gate.weight"] = state["gate.weight"][:3]
    with refused(ValueError, "moe_state_from_hf", "gate.weight has shape [3, 32]", "experts.3.w1.weight"):
        moe_state_from_hf(state)


def test_experts_outside_of_the_range_need_not_be_there():
    state = layer_of("Mixtral", "", "cpu")
    part = {name: t for name, t in state.items() if not name.startswith(("experts.0.", "experts.1."))}
    for name, t in moe_state_from_hf(part, experts=(2, 4)).items():
        assert torch.equal(t, moe_state_from_hf(state, experts=(2, 4))[name])
