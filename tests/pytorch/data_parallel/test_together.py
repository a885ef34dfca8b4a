# Data parallelism together with compiled layers, recomputation, and a weight that a product accumulates itself and that
# is used plainly too. One process: collectives are those of one rank, hooks and counts are the same.
import contextlib
import copy
import gc
import pickle
import threading

import pytest
import torch
import torch.nn.functional as F
from ranks import here
from support import refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
)

from .fake import FakeCommunicator, ladder, wrapped

OVERLAPPED = {"overlap_grad_reduce": True, "bucket_size": 1}


def states(ddp):
    return {group.state.name for group in ddp.bucket_groups}


def test_a_compiled_layer_trains_as_an_eager_one():
    torch.manual_seed(1)
    module, eager = ladder(), ladder()
    eager.load_state_dict(module.state_dict())
    config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_param_gather=True, debug=True, **OVERLAPPED
    )
    ddp = DistributedDataParallel(config, module)
    module[1].compile(backend="aot_eager")
    inner = te.optimizers.FusedSGD(module.parameters(), lr=0.1)
    optimizer, alone = (
        te.optimizers.DistributedOptimizer(inner, ddp),
        te.optimizers.FusedSGD(eager.parameters(), lr=0.1),
    )
    for step in range(3):
        x = torch.randn(4, 16)
        optimizer.zero_grad()
        ddp(x).square().sum().backward()
        assert states(ddp) == ({"IN_FLIGHT"} if step else {"ACCUMULATING"})
        optimizer.step()
        alone.zero_grad()
        eager(x).square().sum().backward()
        alone.step()
        for name, value in ddp.state_dict().items():
            assert torch.equal(value, eager.state_dict()[name]), f"step {step}: {name}"


class Twice(torch.nn.Module):
    """A layer that is recomputed twice, and one that is not recomputed."""

    def __init__(self, reentrant):
        super().__init__()
        self.reentrant = reentrant
        self.again, self.once = (torch.nn.Linear(16, 16, bias=False) for _ in range(2))

    def forward(self, x):
        for _ in range(2):
            x = te.checkpoint(self.again, x, use_reentrant=self.reentrant)
        return self.once(x)


@pytest.mark.parametrize("reentrant", [True, False])
def test_recomputation(reentrant):
    """Reentrant recomputation runs a backward of its own for each use: the layer is ready twice."""
    module = Twice(reentrant)
    with torch.no_grad():
        for p in module.parameters():
            p.copy_(torch.randint(-2, 3, p.shape))
    again, once = (p.detach().clone().requires_grad_() for p in module.parameters())
    F.linear(F.linear(F.linear(torch.ones(4, 16), again), again), once).sum().backward()
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**OVERLAPPED), module)
    for step in range(3):
        ddp.zero_grad_buffer()
        ddp(torch.ones(4, 16, requires_grad=True)).sum().backward()
        assert states(ddp) == ({"IN_FLIGHT"} if step else {"ACCUMULATING"})
        ddp.finish_grad_sync()
        assert torch.equal(module.again.weight.main_grad, again.grad)
        assert torch.equal(module.once.weight.main_grad, once.grad)
    count = ddp.param_to_bucket_group[module.again.weight].expected[module.again.weight]
    assert count == (2 if reentrant else 1)


@pytest.mark.parametrize("sharded", [False, True])
def test_graphs_by_layer_train_as_eager_layers(sharded):
    """Captured after the wrapping; gradients are counted in the replays, and reduced during the backward."""
    found = []
    for graphed in (False, True):
        torch.manual_seed(0)
        options = {"device": here(), "fuse_wgrad_accumulation": True}
        module = torch.nn.Sequential(*(te.LayerNormMLP(32, 64, **options) for _ in range(3)))
        ddp = DistributedDataParallel(
            DistributedDataParallelConfig(use_distributed_optimizer=sharded, **OVERLAPPED), module
        )
        optimizer = DistributedOptimizer(te.optimizers.FusedAdam(module.parameters()), ddp, clip_grad=0.5)
        if graphed:
            samples = tuple((torch.ones(8, 32, device=here(), requires_grad=i > 0),) for i in range(3))
            te.make_graphed_callables(tuple(module), samples)
        for step in range(3):
            optimizer.zero_grad()
            for number, context in enumerate((ddp.no_sync(), contextlib.nullcontext())):
                with context:
                    x = torch.randn(8, 32, generator=torch.Generator().manual_seed(2 * step + number))
                    ddp(x.to(here())).square().mean().backward()
            assert states(ddp) == ({"IN_FLIGHT"} if step else {"ACCUMULATING"})
            norm = optimizer.step()
        found.append([norm, *(p.detach().clone() for p in module.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


class FusedAndPlain(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = te.Linear(32, 32, bias=False, device="cpu", fuse_wgrad_accumulation=True)

    def forward(self, x):
        return self.layer(x) + F.linear(x, self.layer.weight)


def test_a_weight_that_is_used_fused_and_plainly_gets_both():
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**OVERLAPPED), FusedAndPlain())
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(16, 32)).sum().backward()
        ddp.finish_grad_sync()
        assert (ddp.module.layer.weight.main_grad == 32.0).all()


def test_rows_of_one_product_keep_their_order():
    """The buffer joins q, k and v as the layer did, so that no forward copies them; each expert is by itself."""
    layer = te.TransformerLayer(64, 128, 4, device="cpu", fuse_qkv_params=False)
    experts = te.GroupedLinear(3, 64, 64, device="cpu")
    module = torch.nn.ModuleList([layer, experts])
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, **OVERLAPPED)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    ddp = DistributedDataParallel(config, module)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]), name
    units = [unit for part in layer.modules() if hasattr(part, "row_units") for unit in part.row_units()]
    assert units and all(unit.in_order() for unit in units)
    groups = [ddp.param_to_bucket_group[p] for p in experts.parameters()]
    assert len({id(group) for group in groups}) == len(groups)


def wrapped_twice(module, delete, **options):
    """The second of two wrappers of one module."""
    config = DistributedDataParallelConfig(**OVERLAPPED, **options)
    first = DistributedDataParallel(config, module)
    first.zero_grad_buffer()
    held = None if delete else first
    del first
    return DistributedDataParallel(config, module), held


@pytest.mark.parametrize("delete", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_a_second_wrapper_counts_alone(delete, sharded):
    """Also where weight gradients come by backward_dw()."""
    layer = te.Linear(32, 32, bias=False, device="cpu", fuse_wgrad_accumulation=True, delay_wgrad_compute=True)
    module = torch.nn.Sequential(torch.nn.Linear(32, 32, bias=False), layer)
    ddp, held = wrapped_twice(module, delete, use_distributed_optimizer=sharded)
    hooks = (layer._state_dict_pre_hooks, layer._load_state_dict_pre_hooks)
    assert [len(each) for each in hooks] == [1, 1]
    for step in range(3):
        ddp.zero_grad_buffer()
        ddp(torch.ones(16, 32)).sum().backward()
        layer.backward_dw()
        assert states(ddp) == ({"IN_FLIGHT"} if step else {"ACCUMULATING"})
        ddp.finish_grad_sync()
        assert (module[0].weight.main_grad != 0).any() and (layer.weight.main_grad != 0).any()
    assert all(count == 1 for group in ddp.bucket_groups for count in group.expected.values())
    if held is not None:
        with refused(RuntimeError, ".weight'", "wrapped again"):
            held.zero_grad_buffer()


@pytest.mark.parametrize("complete", [True, False])
def test_a_module_is_not_wrapped_again_within_a_step(complete):
    """Ranks whose backwards ended at different layers would have several orders of collectives."""
    module = ladder(3)
    config = DistributedDataParallelConfig(**OVERLAPPED)
    ddp = DistributedDataParallel(config, module)
    for until in (3, 3 if complete else 2):
        ddp.zero_grad_buffer()
        module[:until](torch.ones(1, 16)).sum().backward()
        if until == 3 and not ddp._steps:
            ddp.finish_grad_sync()
    main_grad = module[0].weight.main_grad
    with refused(RuntimeError, "'module'", "being reduced", "zero_grad_buffer()"):
        DistributedDataParallel(config, module)
    assert module[0].weight.main_grad is main_grad
    if complete:
        ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    DistributedDataParallel(config, module)


@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("sharded", [True, False])
def test_files_of_a_module_with_a_wrapper_in_it(sharded, depth):
    """The names are those of the wrapped module, as in the wrapper's own file."""
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded, **OVERLAPPED)
    inner = torch.nn.Sequential(te.LayerNormLinear(16, 16, device="cpu"), torch.nn.BatchNorm1d(16))
    ddp = DistributedDataParallel(config, inner)
    outer = torch.nn.ModuleDict({"head": torch.nn.Linear(2, 2), "body": ddp})
    prefix = "body."
    for _ in range(depth - 1):
        outer, prefix = torch.nn.ModuleList([outer]), f"0.{prefix}"
    saved = copy.deepcopy(outer.state_dict())
    assert {name.removeprefix(prefix) for name in saved if name.startswith(prefix)} == set(ddp.state_dict())
    with torch.no_grad():
        for p in outer.parameters():
            p.zero_()
    assert str(outer.load_state_dict(saved)) == "<All keys matched successfully>"
    for name, value in outer.state_dict().items():
        assert not isinstance(value, torch.Tensor) or torch.equal(value, saved[name]), name
    saved[f"{prefix}more"] = torch.zeros(1)
    del saved[f"{prefix}0.weight"]
    with refused(RuntimeError, f'{prefix}module.more"', f'{prefix}module.0.weight"'):
        outer.load_state_dict(saved)


@pytest.mark.parametrize("depth", [1, 2])
def test_names_of_parameters_in_a_file(depth):
    """The names of named_parameters() are accepted too, also where a module in the wrapped one is called as the
    wrapper calls its own, and both files of such a module."""
    inner = ladder(2, 4)
    inner.module = torch.nn.Linear(4, 4)
    inner.weight = torch.nn.Parameter(torch.ones(3))
    outer = torch.nn.ModuleDict({"body": DistributedDataParallel(DistributedDataParallelConfig(), inner)})
    for _ in range(depth - 1):
        outer = torch.nn.ModuleList([outer])
    for saved in (dict(outer.named_parameters()), outer.state_dict()):
        before = copy.deepcopy(list(outer.parameters()))
        saved = {name: value.detach() + 1.0 for name, value in saved.items()}
        assert str(outer.load_state_dict(saved, strict=False)) == "<All keys matched successfully>"
        for p, was in zip(outer.parameters(), before, strict=True):
            assert torch.equal(p, was + 1.0)


@pytest.mark.parametrize("early", [True, False])
def test_memory_that_other_code_frees(early):
    """Before or after zero_grad_buffer(): gradients are refused by name, until it is there again."""
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**OVERLAPPED), ladder(2))
    storage = ddp.buffers[0].grad_data.untyped_storage()
    size = storage.nbytes()
    for _ in range(3):
        if early:
            storage.resize_(0)
        ddp.zero_grad_buffer()
        storage.resize_(0)
        with refused(RuntimeError, "'1.weight'", "memory is away", "restore_grad_buffers()"):
            ddp(torch.ones(1, 16)).sum().backward()
        with refused(RuntimeError, "scale_gradients()", "memory is away"):
            ddp.scale_gradients(0.5)
        storage.resize_(size)
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 16)).sum().backward()
        ddp.finish_grad_sync()
        assert all((p.main_grad != 0).any() for p in ddp.module.parameters())


@pytest.mark.parametrize("call", [copy.deepcopy, copy.copy, pickle.dumps])
def test_copies_of_a_wrapper(call):
    """Refused; a copy of the module is one as any other."""
    ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), ladder(2))
    with refused(TypeError, "was copied or pickled", "copy.deepcopy(ddp.module)", "ensure_params_ready"):
        call(ddp)
    te.distributed.ensure_params_ready(ddp.module.parameters())
    module = copy.deepcopy(ddp.module)
    for p, q in zip(module.parameters(), ddp.module.parameters()):
        assert torch.equal(p, q) and p.data_ptr() != q.data_ptr()
    again = DistributedDataParallel(DistributedDataParallelConfig(), module)
    again.zero_grad_buffer()
    again(torch.ones(1, 16)).sum().backward()
    assert all((p.main_grad != 0).any() for p in module.parameters())
    assert not any((p.main_grad != 0).any() for p in ddp.module.parameters())


def test_a_module_without_its_wrapper_has_gradients_as_any_other():
    module = ladder(2)
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**OVERLAPPED), module)
    ddp.zero_grad_buffer()
    del ddp
    module(torch.ones(1, 16)).sum().backward()
    assert all((p.grad != 0).any() for p in module.parameters())


@pytest.mark.parametrize("as_function", [True, False])
@pytest.mark.parametrize("sharded", [True, False])
def test_what_was_captured_before_is_refused(as_function, sharded):
    module = te.Linear(32, 32, device="cpu")
    x = torch.ones(16, 32, requires_grad=True)
    callable_ = Calls(module) if as_function else module
    graphed = te.make_graphed_callables(callable_, (x,))
    config = DistributedDataParallelConfig(use_distributed_optimizer=sharded)
    with refused(ValueError, "'module'", "was captured with", "reset()"):
        DistributedDataParallel(config, module)
    assert not hasattr(module.weight, "main_grad")
    graphed.reset()
    DistributedDataParallel(config, module)


class Calls(torch.nn.Module):
    """A module that is captured in place of the one that is wrapped; it has the same parameters."""

    def __init__(self, module):
        super().__init__()
        self.weight, self.bias = module.weight, module.bias

    def forward(self, x):
        return F.linear(x, self.weight, self.bias)


@pytest.mark.parametrize("is_blocked", [False, True])
def test_a_gather_that_is_in_flight_when_all_is_deleted(monkeypatch, is_blocked):
    """It is waited for, so that its memory is freed, unless that would block the host."""
    monkeypatch.setattr(FakeCommunicator, "blocks_host", lambda *_: is_blocked)
    comm, module = FakeCommunicator(), ladder()
    ddp = wrapped(monkeypatch, comm, module, use_distributed_optimizer=True, overlap_param_gather=True, **OVERLAPPED)
    ddp.reset_param_sync_dispatch_state()
    ddp._begin_gathers()
    del ddp
    gc.collect()
    assert len(comm.in_flight()) == 1  # the module waits when it is called
    del module
    gc.collect()
    assert len(comm.in_flight()) == is_blocked


@pytest.mark.parametrize("overlap", [False, True])
def test_a_hook_of_the_weight_that_calls_backward_dw(monkeypatch, overlap):
    """It runs in autograd's accumulator, with a gradient of a plain use in .grad, which the gate takes."""

    def run(in_hook):
        torch.manual_seed(4)
        options = {"bias": False, "device": "cpu", "fuse_wgrad_accumulation": True, "delay_wgrad_compute": True}
        module = torch.nn.ModuleDict({"own": te.Linear(16, 16, **options), "rest": torch.nn.Linear(16, 16)})
        config = OVERLAPPED if overlap else {}
        ddp = wrapped(monkeypatch, FakeCommunicator(), module, **config)
        own, rest, found = module["own"], module["rest"], []
        if in_hook:
            own.weight.register_post_accumulate_grad_hook(lambda _: own.backward_dw())
        for step in range(3):
            ddp.zero_grad_buffer()
            x = torch.randn(4, 16, generator=torch.Generator().manual_seed(step))
            (F.linear(rest(own(x)), own.weight)).square().sum().backward()
            if not in_hook:
                own.backward_dw()
            assert own.weight.grad is None
            if overlap:
                assert states(ddp) == ({"IN_FLIGHT"} if step else {"ACCUMULATING"})
            ddp.finish_grad_sync()
            found += [p.main_grad.clone() for p in module.parameters()]
        return found

    wanted, found = run(False), []
    thread = threading.Thread(target=lambda: found.extend(run(True)), daemon=True)
    thread.start()
    thread.join(60)
    assert not thread.is_alive(), "it waits for itself"
    assert len(found) == len(wanted) and all(torch.equal(a, b) for a, b in zip(found, wanted, strict=True))


def test_a_step_begins_without_what_autograd_left(monkeypatch):
    """As after a backward that an exception ended before the gate."""
    ddp = wrapped(monkeypatch, FakeCommunicator(), ladder(), **OVERLAPPED)
    params = list(ddp.module.parameters())
    params[0].grad, params[1].grad_added_to_main_grad = torch.ones_like(params[0]), True
    ddp.zero_grad_buffer()
    assert params[0].grad is None and params[1].grad_added_to_main_grad is False
    assert not hasattr(params[0], "grad_added_to_main_grad")


def test_a_main_grad_may_be_another_view_of_its_place(monkeypatch):
    """Its address decides, not the object."""
    ddp = wrapped(monkeypatch, FakeCommunicator(), ladder(), use_distributed_optimizer=True, **OVERLAPPED)
    first, last = ddp.module[0].weight, ddp.module[2].weight
    first.main_grad, last.main_grad = first.main_grad.view(-1).view(16, 16), last.main_grad.clone()
    with refused(RuntimeError, "'2.weight' has another main_grad"):
        ddp.zero_grad_buffer()
