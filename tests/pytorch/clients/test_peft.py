"""PEFT's LoRA on our layers: its adapters wrap projections and MLPs, train beside frozen weights, and are saved."""

import pytest
import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.common import recipe

peft = pytest.importorskip("peft")

TARGETS = {
    "attention": ["layernorm_qkv", "proj"],
    "mlp": ["layernorm_mlp"],
    "all": ["layernorm_qkv", "proj", "layernorm_mlp"],
}


def model(device):
    torch.manual_seed(0)
    layers = [
        te.TransformerLayer(32, 32, 4, hidden_dropout=0.0, attention_dropout=0.0, layer_number=i + 1, device=device)
        for i in range(2)
    ]
    for layer in layers:  # what PEFT reads of an MLP
        layer.layernorm_mlp.in_features = layer.layernorm_mlp.out_features = 32
    return torch.nn.Sequential(*layers)


def adapted(device, targets):
    config = peft.LoraConfig(target_modules=TARGETS[targets], r=4, lora_alpha=8, lora_dropout=0.0)
    return peft.get_peft_model(model(device), config)


@pytest.mark.parametrize("targets", TARGETS)
def test_adapters_train_and_are_read_again(device, targets, tmp_path):
    plain, client = model(device), adapted(device, targets)
    x = torch.randn(6, 2, 32, device=device)
    torch.testing.assert_close(client(x), plain(x), rtol=1e-5, atol=1e-5)  # new adapters give zeros
    trained = [p for p in client.parameters() if p.requires_grad]
    frozen = {name: p.detach().clone() for name, p in client.named_parameters() if not p.requires_grad}
    optimizer = te.optimizers.FusedAdam(trained, lr=0.05)
    losses = []
    for _ in range(8):
        with te.autocast(recipe=recipe.Float8CurrentScaling()):
            loss = (client(x) - 1).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    for name, p in client.named_parameters():
        if name in frozen:
            assert p.grad is None
            assert_same_bits(p.detach(), frozen[name], name)
    client.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(model(device), tmp_path)
    with torch.no_grad():
        assert_same_bits(again(x), client(x))
        with client.disable_adapter():
            torch.testing.assert_close(client(x), plain(x), rtol=1e-5, atol=1e-5)


def test_a_whole_model_is_saved(device, tmp_path):
    from safetensors.torch import load_file, save_file

    client = adapted(device, "all")
    state = client.state_dict()
    save_file(state, tmp_path / "all.safetensors")
    loaded = load_file(tmp_path / "all.safetensors")
    assert sorted(loaded) == sorted(state)
    for name, t in state.items():
        assert_same_bits(loaded[name].to(device), t, name)
