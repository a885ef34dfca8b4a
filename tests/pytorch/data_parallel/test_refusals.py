# Bad input is an error that names it and leaves the module as it was. One process, some of it over the fake.
import pytest
import torch
from support import refused
from torch._subclasses.fake_tensor import FakeTensorMode

import transformer_engine.pytorch as te
from transformer_engine.pytorch import data_parallel
from transformer_engine.pytorch.data_parallel import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    DistributedOptimizer,
    partition_buckets,
)
from transformer_engine.pytorch.tensor import IdentityQuantizer

from .fake import FakeCommunicator, ladder, wrapped

Config = DistributedDataParallelConfig


def test_names_are_where_clients_look():
    for name in ("DistributedDataParallel", "DistributedDataParallelConfig", "ParamAndGradBuffer", "BucketGroup"):
        assert hasattr(te.distributed, name)
    assert te.distributed.partition_buckets is partition_buckets
    assert te.optimizers.DistributedOptimizer is DistributedOptimizer


def test_arguments():
    module = torch.nn.Linear(4, 4)
    with refused(TypeError, "'config'", "dict"):
        DistributedDataParallel({}, module)
    with refused(TypeError, "'module'", "Parameter"):
        DistributedDataParallel(Config(), module.weight)
    with refused(ValueError, "'disable_bucketing'", "1"):
        DistributedDataParallel(Config(), module, 1)
    with refused(ValueError, "'calculate_per_token_loss'", "average_in_collective"):
        DistributedDataParallel(Config(average_in_collective=True), module, calculate_per_token_loss=True)
    assert not hasattr(module.weight, "main_grad")


def test_modules():
    with refused(ValueError, "no trainable parameter"):
        DistributedDataParallel(Config(), torch.nn.ReLU())
    with refused(ValueError, "'weight'", "meta", "to_empty()"):
        DistributedDataParallel(Config(), torch.nn.Linear(4, 4, device="meta"))
    shared = torch.nn.ParameterDict({"a": torch.nn.Parameter(torch.zeros(8))})
    shared["b"] = torch.nn.Parameter(shared["a"].detach()[4:])
    with refused(ValueError, "'a'", "'b'", "overlap in memory"):
        DistributedDataParallel(Config(), shared)


def test_parameters_on_two_devices():
    """The second one is a fake tensor: it has a device, and no memory there."""
    with FakeTensorMode():
        elsewhere = torch.nn.Linear(4, 4, device="cuda:0")
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), elsewhere)
    with refused(ValueError, "'1.weight' is on cuda:0", "'0.weight' on cpu", "one device"):
        DistributedDataParallel(Config(), module)
    assert not any(hasattr(p, "main_grad") for p in module.parameters())


def test_gathers_without_shards_warn_and_have_no_hooks():
    with pytest.warns(UserWarning, match="overlap_param_gather=True without use_distributed_optimizer"):
        ddp = DistributedDataParallel(Config(overlap_param_gather=True), torch.nn.Linear(4, 4))
    assert not ddp.use_forward_hook and not ddp.remove_forward_pre_hook_handles
    with refused(RuntimeError, "use_forward_hook=False", "overlap_param_gather=True"):
        ddp.enable_forward_pre_hook()


def test_gathers_without_overlapped_gradients_have_one_bucket(monkeypatch):
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True, "bucket_size": 1}
    ddp = wrapped(monkeypatch, FakeCommunicator(), ladder(), **options)
    assert len(ddp.bucket_groups) == 1 and ddp.use_forward_hook


def test_hooks_twice(monkeypatch):
    options = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    ddp = wrapped(monkeypatch, FakeCommunicator(), ladder(), **options)
    with refused(RuntimeError, "hooks there already", "disable_forward_pre_hook()"):
        ddp.enable_forward_pre_hook()
    ddp.disable_forward_pre_hook()
    with refused(RuntimeError, "disable_forward_pre_hook()", "without hooks"):
        ddp.disable_forward_pre_hook()


@pytest.mark.parametrize("sharded", [False, True])
def test_parameters_that_changed_since(sharded):
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=sharded), ladder(2, 4))
    first = ddp.module[0].weight
    first.requires_grad_(False)
    with refused(RuntimeError, "'0.weight'", "frozen"):
        ddp.zero_grad_buffer()
    first.requires_grad_(True)
    ddp.zero_grad_buffer()
    ddp.module.append(torch.nn.Linear(4, 4))
    with refused(RuntimeError, "'2.weight'", "not trainable, or not there"):
        ddp.zero_grad_buffer()
    del ddp.module[2]
    first.main_grad = torch.zeros(4, 4)
    with refused(RuntimeError, "'0.weight'", "another main_grad"):
        ddp.zero_grad_buffer()
    if sharded:
        ddp = DistributedDataParallel(Config(use_distributed_optimizer=True), ladder(2, 4))
        ddp.module[1].weight.data = torch.zeros(4, 4)
        with refused(RuntimeError, "'1.weight'", "moved out of its buffer"):
            ddp.zero_grad_buffer()


def test_a_backward_without_zero_grad_buffer():
    ddp = DistributedDataParallel(Config(), ladder(2, 4))
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, 4)).sum().backward()
    ddp.finish_grad_sync()
    with refused(RuntimeError, "weight'", "after the gradients were reduced", "zero_grad_buffer()"):
        ddp(torch.ones(1, 4)).sum().backward()


def test_sparse_gradients():
    ddp = DistributedDataParallel(Config(), torch.nn.Embedding(4, 4, sparse=True))
    ddp.zero_grad_buffer()
    with refused(ValueError, "'weight'", "sparse", "sparse=False"):
        ddp(torch.tensor([1])).sum().backward()


def test_the_marks_of_other_libraries():
    """A gradient that is marked as part of main_grad is not added again, unless it is one of zeros."""
    ddp = DistributedDataParallel(Config(), ladder(1, 4))
    weight = ddp.module[0].weight
    for added, zeros, wanted in ((False, False, 1.0), (True, False, 0.0), (True, True, 1.0)):
        ddp.zero_grad_buffer()
        weight.grad_added_to_main_grad, weight.zero_out_wgrad = added, zeros
        ddp(torch.ones(1, 4)).sum().backward()
        assert (weight.main_grad == wanted).all() and weight.grad is None
    ddp.zero_grad_buffer()
    assert weight.grad_added_to_main_grad is False


@pytest.mark.parametrize("sharded", [False, True])
def test_memory(sharded):
    """The weights' own memory is freed, views stay while the gradients are away."""
    module = ladder(3, 64)
    before = [p.untyped_storage() for p in module.parameters()]
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=sharded, grad_reduce_in_fp32=True), module)
    (buffer,) = ddp.buffers
    storages = {p.untyped_storage().data_ptr() for p in module.parameters()}
    assert storages == ({buffer.param_data.data_ptr()} if sharded else {s.data_ptr() for s in before})
    assert list(ddp.buffers()) == []
    ddp.offload_grad_buffers()
    assert buffer.grad_data.untyped_storage().nbytes() == 0
    ddp.restore_grad_buffers()
    ddp.zero_grad_buffer()
    ddp(torch.ones(1, 64)).sum().backward()
    assert all((p.main_grad != 0).any() for p in module.parameters())
    ddp.scale_gradients(torch.tensor(0.0))
    assert not buffer.grad_data.any()
    ddp.free_overlap_buffers()


def test_layout_prints(monkeypatch):
    ddp = wrapped(monkeypatch, FakeCommunicator(), ladder(2), use_distributed_optimizer=True)
    rows = ddp.layout()
    assert [row.name for row in rows] == ["1.weight", "0.weight"]
    assert rows[0].shards == (0,) and rows[1].shards == (1,)
    assert "256 .. 512  0.weight" in str(rows)


@pytest.mark.parametrize("fullgraph", [True, False])
def test_torch_compile_of_the_wrapper(fullgraph):
    ddp = DistributedDataParallel(Config(), ladder(1, 4))
    with pytest.raises(Exception, match=r"torch\.compile was called on the wrapper"):
        torch.compile(ddp, backend="eager", fullgraph=fullgraph)(torch.ones(1, 4))
    with refused(RuntimeError, "torch.compile was called on the wrapper", "layer.compile()"):
        ddp.compile()


def test_gradients_that_are_being_reduced_are_not_scaled(monkeypatch):
    """None of them, where a part of them is."""
    options = {"overlap_grad_reduce": True, "bucket_size": 1}
    ddp = wrapped(monkeypatch, FakeCommunicator(size=1), ladder(3), **options)
    ddp.zero_grad_buffer()
    for p in ddp.module.parameters():
        p.main_grad.fill_(1.0)
    ddp.bucket_groups[1].start_grad_sync()
    for call in (ddp.scale_gradients, ddp.buffers[0].scale_gradients):
        with refused(RuntimeError, "scale_gradients()", "being reduced", "finish_grad_sync()"):
            call(0.5)
    assert all((p.main_grad == 1.0).all() for p in ddp.module.parameters())
    ddp.finish_grad_sync()
    ddp.scale_gradients(0.5)
    assert all((p.main_grad == 0.5).all() for p in ddp.module.parameters())


@pytest.mark.parametrize("fused", [True, False])
def test_gradients_whose_memory_is_away(fused):
    layer = te.Linear(32, 32, bias=False, device="cpu", fuse_wgrad_accumulation=fused)
    ddp = DistributedDataParallel(Config(overlap_grad_reduce=True), torch.nn.Sequential(layer))
    for _ in range(2):
        ddp.zero_grad_buffer()
        ddp(torch.ones(16, 32)).sum().backward()
        ddp.finish_grad_sync()
        ddp.offload_grad_buffers()
        with refused(RuntimeError, "scale_gradients()", "memory is away", "restore_grad_buffers()"):
            ddp.scale_gradients(0.5)
        ddp.zero_grad_buffer()
        with pytest.raises((RuntimeError, ValueError)) as caught:
            ddp(torch.ones(16, 32)).sum().backward()
        assert ("'0.weight'" in str(caught.value) and "restore_grad_buffers()" in str(caught.value)) or fused
        with refused(RuntimeError, "start_grad_sync()", "restore_grad_buffers()"):
            ddp.start_grad_sync()
        ddp.restore_grad_buffers()
        ddp.zero_grad_buffer()


def test_a_refused_gradient_is_not_added_later():
    ddp = DistributedDataParallel(Config(), ladder(1, 4))
    for refuse in (True, False):
        ddp.zero_grad_buffer()
        ddp(torch.ones(1, 4)).sum().backward()
        ddp.finish_grad_sync()
        assert (ddp.module[0].weight.main_grad == 1.0).all()
        if refuse:
            with refused(RuntimeError, "after the gradients were reduced"):
                ddp(torch.ones(1, 4)).sum().backward()


# ---- the optimizer ----


def test_optimizers():
    ddp = DistributedDataParallel(Config(), ladder(2, 4))
    params = list(ddp.module.parameters())
    with refused(NotImplementedError, "'optimizer'", "RMSprop", "FusedAdam"):
        DistributedOptimizer(torch.optim.RMSprop(params), ddp)
    with refused(TypeError, "'ddps'", "Sequential"):
        DistributedOptimizer(torch.optim.SGD(params), [ddp.module])
    with refused(ValueError, "'ddps'", "empty"):
        DistributedOptimizer(torch.optim.SGD(params), [])
    with refused(ValueError, "'clip_grad'", "-1"):
        DistributedOptimizer(torch.optim.SGD(params), ddp, clip_grad=-1)
    with refused(ValueError, "group 0", "1 parameters", "(3,)"):
        DistributedOptimizer(torch.optim.SGD([*params, torch.nn.Parameter(torch.ones(3))]), ddp)
    with refused(ValueError, "'overlap_param_gather_with_optimizer_step'", "overlap_param_gather=True"):
        DistributedOptimizer(torch.optim.SGD(params), ddp, overlap_param_gather_with_optimizer_step=True)
    stepped = torch.optim.SGD(params, momentum=0.9)
    params[0].grad = torch.ones(4, 4)
    stepped.step()
    params[0].grad = None
    with refused(ValueError, "'optimizer'", "states already", "load_state_dict()"):
        DistributedOptimizer(stepped, ddp)
    with te.quantized_model_init(enabled=True):
        quantized = DistributedDataParallel(Config(), te.Linear(32, 32, device="cpu"))
    adam = te.optimizers.FusedAdam(quantized.module.parameters())
    with refused(ValueError, "'optimizer'", "FusedAdam(master_weights=True)"):
        DistributedOptimizer(adam, quantized)
    with refused(ValueError, "'optimizer'", "dampening", "FusedSGD"):
        DistributedOptimizer(torch.optim.SGD(params, momentum=0.9, dampening=0.5), ddp)
    optimizer = DistributedOptimizer(torch.optim.SGD(params), ddp)
    optimizer.found_inf = True
    with refused(TypeError, "'found_inf'", "True", "tensor"):
        optimizer.step()
    optimizer.found_inf = torch.zeros(2)
    with refused(ValueError, "'found_inf'", "[2]", "one element"):
        optimizer.step()
    with refused(NotImplementedError, "add_param_group()"):
        optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(3))]})


def test_state_dicts():
    ddp = DistributedDataParallel(Config(use_distributed_optimizer=True), ladder(2, 4))
    optimizer = DistributedOptimizer(te.optimizers.FusedAdam(ddp.module.parameters()), ddp)
    state = optimizer.state_dict()
    with refused(ValueError, "groups of [1] parameters", "wanted [2]"):
        optimizer.load_state_dict({"state": {}, "param_groups": [{"params": [0]}]})
    with refused(ValueError, "no state of parameter 0"):
        optimizer.load_state_dict({**state, "state": {}})
    lacking = {**state, "state": {0: {"exp_avg": torch.zeros(4, 4)}, 1: state["state"][1]}}
    with refused(ValueError, "parameter 0", "exp_avg_sq"):
        optimizer.load_state_dict(lacking)
    wrong = {**state["state"][0], "exp_avg": torch.zeros(3)}
    with refused(ValueError, "'exp_avg'", "[3]", "[4, 4]"):
        optimizer.load_state_dict({**state, "state": {**state["state"], 0: wrong}})


def test_weights_of_modules_that_are_not_called():
    """Each forward reads whole weights, and a second step() waits for the gathers that the first one started."""
    attention = torch.nn.MultiheadAttention(8, 2)
    attention.more = torch.nn.ParameterList([torch.ones(8), torch.ones(8)])
    options = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "overlap_param_gather": True}
    ddp = DistributedDataParallel(Config(bucket_size=1, **options), attention)
    optimizer = DistributedOptimizer(te.optimizers.FusedAdam(attention.parameters()), ddp)
    x = torch.randn(3, 1, 8)
    for _ in range(2):
        ddp.zero_grad_buffer()
        (ddp(x, x, x)[0] * attention.more[0] * attention.more[1]).sum().backward()
        assert not any(group.is_stale for group in ddp.bucket_groups)
        optimizer.step()
    optimizer.step()


def test_groups_of_fp8_weights():
    """Other weights join the last group of FP8 weights, unless they have bucket_size elements."""

    def groups(bucket_size):
        with te.quantized_model_init(enabled=True):
            module = torch.nn.Sequential(*(te.Linear(32, 32, device="cpu") for _ in range(3)))
        ddp = DistributedDataParallel(Config(overlap_grad_reduce=True, bucket_size=bucket_size), module)
        return [[p.dim() for p in group.params_list] for group in ddp.bucket_groups]

    assert groups(1000) == [[2], [2], [2, 1, 1, 1]]
    assert groups(32) == [[2], [2], [2], [1], [1], [1]]
    assert partition_buckets([]) == []


def test_calls_that_are_captured(monkeypatch):
    """A flag of the stream, which a CPU does not have, is set by hand."""
    ddp = DistributedDataParallel(Config(), ladder(1, 4))
    optimizer = DistributedOptimizer(te.optimizers.FusedSGD(ddp.module.parameters(), lr=0.1), ddp)
    before = ddp.module[0].weight.detach().clone()
    for module in (data_parallel.optimizer, data_parallel.wrapper):
        monkeypatch.setattr(module, "stream_captures", lambda: True)
    with refused(NotImplementedError, "step()", "captured", "outside of graphs"):
        optimizer.step()
    with refused(RuntimeError, "offload_grad_buffers()", "captured"):
        ddp.offload_grad_buffers()
    assert torch.equal(ddp.module[0].weight, before) and ddp.buffers[0].has_memory()


def test_a_parameter_that_was_thawed():
    module = ladder(2, 4)
    module[0].weight.requires_grad_(False)
    ddp = DistributedDataParallel(Config(), module)
    ddp.zero_grad_buffer()
    module[0].weight.requires_grad_(True)
    with refused(RuntimeError, "'0.weight'", "not trainable"):
        ddp.zero_grad_buffer()


def test_groups_of_another_type():
    for name in ("process_group", "expert_process_group"):
        with refused(TypeError, f"'{name}'", "int", "ProcessGroup"):
            DistributedDataParallel(Config(), ladder(1, 4), **{name: 3})


def test_quantized_weights_that_are_not_sharded():
    module = torch.nn.Linear(32, 32)
    module.weight = torch.nn.Parameter(IdentityQuantizer().quantize(module.weight.detach()))
    with refused(NotImplementedError, "'weight'", "IdentityTensor", "use_distributed_optimizer=False"):
        DistributedDataParallel(Config(use_distributed_optimizer=True), module)
    assert not hasattr(module.bias, "main_grad")


@pytest.mark.parametrize("fp32", [True, False])
def test_fp8_weights_of_two_dtypes(fp32):
    """Their gradients have one dtype. The module and an earlier wrapper of a part stay as they were."""
    with te.quantized_model_init(enabled=True):
        dtypes = torch.bfloat16, torch.float32
        layers = [te.Linear(32, 32, bias=False, device="cpu", params_dtype=dtype) for dtype in dtypes]
    module = torch.nn.Sequential(*layers, torch.nn.Linear(32, 32, bias=False))
    earlier = DistributedDataParallel(Config(), module[2])
    main_grad = module[2].weight.main_grad
    if fp32:
        assert len(DistributedDataParallel(Config(grad_reduce_in_fp32=True), module).buffers) == 2
        return
    with refused(ValueError, "'1.weight' and '0.weight'", "float32 and torch.bfloat16", "grad_reduce_in_fp32=True"):
        DistributedDataParallel(Config(), module)
    assert not hasattr(module[0].weight, "main_grad") and module[2].weight.main_grad is main_grad
    earlier.zero_grad_buffer()
    earlier(torch.ones(1, 32)).sum().backward()
    assert (main_grad == 1.0).all()
