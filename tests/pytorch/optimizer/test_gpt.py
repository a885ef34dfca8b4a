"""A GPT loop as frameworks write it: FusedAdam with masters, the norm of all gradients by multi_tensor_l2norm, clipping
by multi_tensor_scale, a step that is left out where the norm is not finite. In float32 its losses are those of torch's
AdamW, clipped by torch, within 0.1 %.

Mutant: the clip factor without the norm of one of the parameters -> red."""

import torch
from support import assert_same_bits

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import (
    FusedAdam,
    multi_tensor_applier,
    multi_tensor_l2norm,
    multi_tensor_scale,
)

VOCABULARY, HIDDEN, SEQ, BATCH, STEPS, CLIP = 17, 32, 8, 8, 200, 1.0
GROUPS = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8}


class GPT(torch.nn.Module):
    def __init__(self, device):
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, HIDDEN, device=device)
        options = {"hidden_dropout": 0.0, "attention_dropout": 0.0, "self_attn_mask_type": "causal", "device": device}
        self.layers = torch.nn.ModuleList(te.TransformerLayer(HIDDEN, 2 * HIDDEN, 4, **options) for _ in range(1))
        self.head = te.LayerNormLinear(HIDDEN, VOCABULARY, bias=False, device=device)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def loss_of(model, step, device):
    """The next token follows from the last one; tokens [SEQ + 1, BATCH]."""
    tokens = torch.randint(0, VOCABULARY, (SEQ + 1, BATCH), generator=torch.Generator().manual_seed(step))
    for i in range(1, SEQ + 1):
        tokens[i] = (3 * tokens[i - 1] + 1) % VOCABULARY
    tokens = tokens.to(device)
    return torch.nn.functional.cross_entropy(model(tokens[:-1]).flatten(0, 1), tokens[1:].flatten())


def decayed(model):
    """Matrices are, vectors are not."""
    params = list(model.parameters())
    groups = [([p for p in params if p.dim() > 1], 0.1), ([p for p in params if p.dim() < 2], 0.0)]
    return [{"params": p, "weight_decay": decay} for p, decay in groups]


def fused(model, device, losses, spoil=None, steps=None):
    optimizer = FusedAdam(decayed(model), **GROUPS, master_weights=True)
    overflow, skipped = torch.zeros(1, dtype=torch.int32, device=device), 0
    for step in range(steps or (STEPS if spoil is None else spoil + 1)):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        grads = [p.grad for p in model.parameters()]
        if step == spoil:
            grads[-1].view(-1)[3] = torch.inf
        overflow.zero_()
        norm, _ = multi_tensor_applier(multi_tensor_l2norm, overflow, [grads], False)
        if overflow.item():
            skipped += 1
            continue
        factor = CLIP / (norm.item() + 1e-6)
        if factor < 1.0:
            multi_tensor_applier(multi_tensor_scale, overflow, [grads, grads], factor)
        optimizer.step()
        losses.append(loss.item())
    return optimizer, skipped


def by_torch(model, device, losses):
    optimizer = torch.optim.AdamW(decayed(model), **GROUPS)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model, step, device)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append(loss.item())


def models(device, count):
    torch.manual_seed(7)
    made = [GPT(device) for _ in range(count)]
    for model in made[1:]:
        model.load_state_dict(made[0].state_dict())
    return made


def test_losses_are_those_of_torchs_adamw(device):
    (ours, theirs), got, wanted = models(device, 2), [], []
    fused(ours, device, got)
    by_torch(theirs, device, wanted)
    assert wanted[-1] < 0.7 * wanted[0]
    assert max(abs(a - b) / b for a, b in zip(got, wanted, strict=True)) < 1e-3


def test_a_step_with_inf_is_left_out(device):
    """The weights are those of the steps before it."""
    (spoilt, plain), losses = models(device, 2), []
    optimizer, skipped = fused(spoilt, device, losses, spoil=2)
    assert skipped == 1 and len(losses) == 2 and optimizer.param_groups[0]["step"] == 2
    fused(plain, device, [], spoil=2, steps=2)
    for p, q in zip(spoilt.parameters(), plain.parameters(), strict=True):
        assert_same_bits(p, q)
