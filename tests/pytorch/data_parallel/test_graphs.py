# Captured callables whose weights are gathered: hooks of modules in a graph do not run in its replays, so each replay
# waits for all weights that it reads. The fake changes memory when it is waited for, never before.
import copy

import pytest
import torch
from ranks import here
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    hooks,
)

from .fake import FakeCommunicator, ladder, wrapped

GATHERS = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
WIDTH = 16


class Steps:
    """Layers that are captured two by two, on one of two ranks. A step writes its number into the shards of both."""

    def __init__(self, monkeypatch, **options):
        self.comm, self.number = FakeCommunicator(), 0.0
        self.module = torch.nn.Sequential(ladder(2), ladder(2))
        self.ddp = wrapped(monkeypatch, self.comm, self.module, bucket_size=1, **GATHERS, **options)

    def capture(self):
        samples = tuple((torch.ones(1, WIDTH, requires_grad=i > 0),) for i in range(2))
        te.make_graphed_callables(tuple(self.module), samples)

    def step(self):
        self.number = self.comm.others = self.number + 1.0
        for group in self.ddp.bucket_groups:
            for bucket in group.buckets:
                bucket.own_params.fill_(self.number)
        self.ddp.reset_param_sync_dispatch_state()
        self.ddp._begin_gathers()

    def whole(self):
        return [bool((p == self.number).all()) for p in self.module.parameters()]


@pytest.mark.parametrize("align", [False, True])
@pytest.mark.parametrize("stale", [False, True])
def test_a_replay_waits_for_all_weights_in_it(monkeypatch, stale, align):
    run = Steps(monkeypatch, align_param_gather=align, debug=True)
    if stale:  # the capture waits for them
        run.step()
    run.capture()
    assert not any(group.is_stale for group in run.ddp.bucket_groups)
    for _ in range(3):
        run.step()
        x = torch.ones(1, WIDTH)
        for i in range(2):
            x = run.module[i](x)
            assert all(run.whole()[: 2 + 2 * i]) and (x == (WIDTH * run.number) ** (2 + 2 * i)).all()
            assert len(run.comm.in_flight()) == (0 if i or align else 2)  # as many more as were waited for


def test_without_hooks_a_replay_waits_for_nothing(monkeypatch):
    run = Steps(monkeypatch)
    run.capture()
    run.ddp.disable_forward_pre_hook()
    run.ddp.reset_param_sync_dispatch_state()
    run.comm.log.clear()
    run.module[0](torch.ones(1, WIDTH))
    assert not run.comm.log
    run.ddp.enable_forward_pre_hook()
    run.module[0](torch.ones(1, WIDTH))
    assert len(run.comm.started("gather")) == 4


def test_hooks_rest_in_other_captures(monkeypatch):
    """A wait for work outside of a capture would end it. The flag of the stream is set by hand."""
    run = Steps(monkeypatch)
    run.step()
    monkeypatch.setattr(hooks, "stream_captures", lambda: True)
    before = list(run.comm.log)
    run.module(torch.ones(1, WIDTH))
    assert run.comm.log == before


def test_other_hooks_are_refused_beside_them(monkeypatch):
    run = Steps(monkeypatch)
    run.module[0].register_forward_pre_hook(lambda *_: None)
    with refused(ValueError, "has hooks", "after the capture"):
        run.capture()


@pytest.mark.parametrize("clones", [False, True])
@pytest.mark.parametrize("by_group", [False, True])
def test_captured_layers_train_as_eager_ones(by_group, clones):
    """Captured between a step and the forward that waits for its gathers; one layer waits for several groups."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        options = {"device": here(), "fuse_wgrad_accumulation": True, "fuse_qkv_params": True}
        options |= {"hidden_dropout": 0.0, "attention_dropout": 0.0}
        module = torch.nn.Sequential(*(te.TransformerLayer(32, 64, 2, **options) for _ in range(2)))
        ddp = DistributedDataParallel(DistributedDataParallelConfig(bucket_size=1, **GATHERS), module)
        adam = te.optimizers.FusedAdam(module.parameters())
        optimizer = DistributedOptimizer(adam, ddp, overlap_param_gather_with_optimizer_step=by_group)
        for step in range(4):
            if graphed and step == 1:
                samples = tuple((torch.ones(8, 2, 32, device=here(), requires_grad=i > 0),) for i in range(2))
                te.make_graphed_callables(tuple(module), samples, clone_param_grads_on_return=clones)
            optimizer.zero_grad()
            x = torch.randn(8, 2, 32, generator=torch.Generator().manual_seed(step))
            ddp(x.to(here())).square().mean().backward()
            norm = optimizer.step()
        found.append([norm, *(value.clone() for value in ddp.state_dict().values() if isinstance(value, torch.Tensor))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_layers_that_are_captured_one_after_another_copy_nothing():
    """Each with the result of the one before as its sample: that is its static input."""
    torch.manual_seed(0)
    layers = [te.LayerNormMLP(32, 64, device=here()) for _ in range(3)]
    eager = copy.deepcopy(layers)
    sample = torch.ones(8, 32, device=here())
    for layer in layers:
        te.make_graphed_callables(layer, (sample,), clone_param_grads_on_return=False)
        sample = layer(sample).detach().requires_grad_()
    forwards = [layer.forward.record.forward_graph for layer in layers]
    assert [f.input_addresses[0] for f in forwards[1:]] == [f.outputs[0].data_ptr() for f in forwards[:-1]]
    for step in range(3):
        y = wanted = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)).to(here())
        for layer, other in zip(layers, eager):
            y, wanted = layer(y), other(wanted)
        assert torch.equal(y, wanted)
        (y.square().sum() + wanted.square().sum()).backward()
        for layer, other in zip(layers, eager):
            for p, q in zip(layer.parameters(), other.parameters(), strict=True):
                assert torch.equal(p.grad, q.grad)
                p.grad = q.grad = None
