# Every order of calls, on a communicator that changes memory only when it is waited for: weights are those of the last
# step wherever a forward reads them, gradients are whole wherever they are read, and collectives start in one order.
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import refused

from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, wrapper

from .fake import FakeCommunicator, ladder, wrapped

SHARDED = {"use_distributed_optimizer": True, "overlap_grad_reduce": True, "bucket_size": 1}
GATHERS = {**SHARDED, "overlap_param_gather": True}


class Run:
    """A wrapped ladder; weights hold the number of the step that wrote them."""

    def __init__(self, monkeypatch, **options):
        self.comm = FakeCommunicator()
        self.module = ladder()
        self.ddp = wrapped(monkeypatch, self.comm, self.module, **{**GATHERS, **options})
        self.number = 0
        self.write()
        self.ddp.start_param_sync(force_sync=True)
        self.comm.log.clear()

    def write(self):
        self.ddp._ready()  # a step follows a forward and a backward of all layers
        self.number += 1
        self.comm.others = float(self.number)
        for group in self.ddp.bucket_groups:
            for bucket in group.buckets:
                bucket.own_shard(bucket.param_data).fill_(self.number)
        self.ddp.reset_param_sync_dispatch_state()

    def step(self):
        self.write()
        self.ddp._begin_gathers()

    def step_without_a_gather(self):
        self.write()

    def dispatch(self):
        if not any(group.is_gathering for group in self.ddp.bucket_groups):
            self.ddp.start_param_sync()

    def force(self):
        self.ddp.start_param_sync(force_sync=True)

    def switch(self):
        if self.ddp.remove_forward_pre_hook_handles:
            self.ddp.disable_forward_pre_hook()
        else:
            self.ddp.enable_forward_pre_hook()

    def save(self):
        for name, value in self.ddp.state_dict().items():
            assert (value == self.number).all(), name

    def forward(self, layer):
        if not self.ddp.remove_forward_pre_hook_handles and any(g.is_stale for g in self.ddp.bucket_groups):
            self.ddp.start_param_sync(force_sync=True)  # without hooks a caller waits
        part = self.module[layer]
        part(torch.ones(1, 16))
        assert (part.weight == self.number).all(), f"layer {layer} read {part.weight.unique()}, wanted {self.number}"

    def act(self, name):
        if isinstance(name, int):
            self.forward(name)
        else:
            getattr(self, name)()


ACTS = ["step", "step_without_a_gather", "dispatch", "force", "switch", "save", 0, 1, 2]


@pytest.mark.parametrize("align", [False, True])
def test_weights_are_fresh_in_every_order(monkeypatch, align):
    for acts in itertools.product(ACTS, repeat=3):
        run = Run(monkeypatch, align_param_gather=align)
        for act in ("step", *acts, 0, 1, 2):
            run.act(act)


@settings(max_examples=150, deadline=None, derandomize=True)
@given(st.lists(st.sampled_from(ACTS), max_size=12), st.booleans(), st.booleans())
def test_weights_are_fresh_in_long_runs(acts, align, debug):
    with pytest.MonkeyPatch.context() as monkeypatch:
        run = Run(monkeypatch, align_param_gather=align, debug=debug)
        for act in (*acts, 0, 1, 2):
            run.act(act)


def test_gathers_go_from_group_to_group(monkeypatch):
    run = Run(monkeypatch)
    run.comm.numbers.clear()
    last, middle, first = (group.buckets[0].param_data.data_ptr() for group in run.ddp.bucket_groups)
    run.step()
    assert [run.comm.numbers[first]] == run.comm.started("gather")  # the layer that a forward reads first
    run.forward(0)
    assert run.comm.started("gather") == [run.comm.numbers[p] for p in (first, middle)]
    run.forward(1)
    assert run.comm.started("gather") == [run.comm.numbers[p] for p in (first, middle, last)]
    assert [what for what, *_ in run.comm.log] == ["start", "wait", "start", "wait", "start"]
    run.forward(2)
    run.forward(0)
    assert len(run.comm.started("gather")) == 3 and not run.comm.in_flight()


@pytest.mark.parametrize("begun", [False, True])
def test_a_module_of_several_groups_starts_all_before_it_waits(monkeypatch, begun):
    """And as many after it: those of the next module are under way when its forward begins."""
    comm = FakeCommunicator()
    layers = torch.nn.Sequential(*(torch.nn.Linear(16, 16) for _ in range(3)))
    ddp = wrapped(monkeypatch, comm, layers, **GATHERS)
    assert len(ddp.bucket_groups) == 6
    ddp.reset_param_sync_dispatch_state()
    if begun:
        ddp._begin_gathers()
    wait, start = ["wait"] * 2, ["start"] * 2
    for layer, wanted in zip(layers, ([*start[begun:], *wait, *start], [*wait, *start], wait), strict=True):
        comm.log.clear()
        layer(torch.ones(1, 16))
        assert [what for what, *_ in comm.log] == wanted


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_any_order_of_forwards_gathers_in_one_order(monkeypatch, order):
    run = Run(monkeypatch)
    run.comm.numbers.clear()
    run.step()
    for layer in order:
        run.forward(layer)
    assert run.comm.started("gather") == [0, 1, 2] and not run.comm.in_flight()


@pytest.mark.parametrize("layer", [0, 3])
def test_gathers_of_two_process_groups_have_one_order(monkeypatch, layer):
    """A rank that skips experts has started the gathers that another rank may wait for: before that of layer 3, which
    layer 0 starts."""
    comms = {"process_group": FakeCommunicator(), "expert_process_group": FakeCommunicator()}
    monkeypatch.setattr(wrapper, "Communicator", lambda name, _: comms[name])
    module = ladder(4)
    for i in (1, 2):
        module[i].weight.allreduce = False
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**GATHERS), module, expert_process_group=object())
    ddp.zero_grad_buffer()
    backward(ddp, [3, 2, 1, 0])
    ddp.finish_grad_sync()
    ddp.reset_param_sync_dispatch_state()
    ddp._begin_gathers()
    assert [len(comm.started("gather")) for comm in comms.values()] == [1, 1]
    module[layer](torch.ones(1, 16))
    assert [len(comm.started("gather")) for comm in comms.values()] == [2, 2]


def test_a_forward_between_reduction_and_step_leaves_nothing_stale(monkeypatch):
    run = Run(monkeypatch)
    run.ddp.zero_grad_buffer()
    run.ddp(torch.ones(1, 16)).sum().backward()
    run.ddp.finish_grad_sync()
    run.forward(0)
    assert not run.comm.started("gather")
    run.step()
    for layer in range(3):
        run.forward(layer)


def test_a_second_gather(monkeypatch):
    run = Run(monkeypatch)
    run.step()
    with refused(RuntimeError, "start_param_sync()", "pending", "force_sync=True"):
        run.ddp.start_param_sync()
    started = len(run.comm.started("gather"))
    run.ddp.bucket_groups[-1].start_param_sync(force_sync=True)  # waits, and starts none
    assert len(run.comm.started("gather")) == started and not run.comm.in_flight()
    with refused(RuntimeError, "shards were written"):
        run.ddp.bucket_groups[0].start_param_sync()
        run.ddp.reset_param_sync_dispatch_state()


def test_a_backward_after_a_step_raises(monkeypatch):
    run = Run(monkeypatch)
    x = torch.ones(1, 16, requires_grad=True)
    loss = run.ddp(x).sum()
    run.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


# ---- gradients ----


def grads(module):
    return [p.main_grad for p in module.parameters()]


def backward(ddp, order=None):
    """Gradients of 1 that become ready in that order, as gates bring them."""
    params = list(ddp.module.parameters())
    for i in range(len(params)) if order is None else order:
        params[i].main_grad.add_(1.0)
        ddp.param_to_bucket_group[params[i]].register_grad_ready(params[i])


@pytest.mark.parametrize("first", list(itertools.permutations(range(3))))
def test_gradients_are_reduced_in_the_first_steps_order(monkeypatch, first):
    for later in itertools.permutations(range(3)):
        comm = FakeCommunicator()
        ddp = wrapped(monkeypatch, comm, ladder(), **SHARDED)
        data = [ddp.param_to_bucket_group[p].buckets[0].grad_data for p in ddp.module.parameters()]
        ddp.zero_grad_buffer()
        backward(ddp, first)
        assert not comm.started("reduce")  # the counts are measured in this step
        ddp.finish_grad_sync()
        assert comm.started("reduce") == [0, 1, 2] and not comm.in_flight()
        comm.log.clear()
        comm.numbers = {data[i].data_ptr(): i for i in range(3)}
        ddp.zero_grad_buffer()
        for n in range(3):
            backward(ddp, later[n : n + 1])
            wanted = list(itertools.takewhile(later[: n + 1].__contains__, first))
            assert comm.started("reduce") == wanted
        ddp.finish_grad_sync()
        ddp.finish_grad_sync()  # does nothing
        assert comm.started("reduce") == list(first) and not comm.in_flight()


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("average", [False, True])
def test_gradients_are_scaled_once_and_waited_for(monkeypatch, sharded, ordered, average):
    if ordered and average:
        return
    comm = FakeCommunicator()
    options = {"use_distributed_optimizer": sharded, "reproducible": ordered, "average_in_collective": average}
    ddp = wrapped(monkeypatch, comm, ladder(), overlap_grad_reduce=True, bucket_size=1, **options)
    for _ in range(3):
        ddp.zero_grad_buffer()
        backward(ddp)
        ddp.finish_grad_sync()
        assert not comm.in_flight()
        for group in ddp.bucket_groups:
            (bucket,) = group.buckets
            own = bucket.own_shard(bucket.grad_data) if sharded else bucket.grad_data
            # The fake sums over two ranks, for an average too.
            assert own[: 8 * 16].unique().tolist() == [2.0 if average else 1.0]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("way", ["slow host", "fast host", "device"])
def test_scratch_memory_of_ordered_sums(monkeypatch, sharded, way):
    """Two of them have it at most, unless a wait inside of a backward would block the host. Collectives start in one
    order on fast and on slow ranks."""
    comm = FakeCommunicator(is_fast=way == "fast host")
    monkeypatch.setattr(FakeCommunicator, "blocks_host", lambda *_: way != "device")
    options = {**SHARDED, "use_distributed_optimizer": sharded}
    ddp = wrapped(monkeypatch, comm, ladder(5), **options, reproducible=True)
    for _ in range(3):
        ddp.zero_grad_buffer()
        comm.log.clear()
        most = 0
        for i in reversed(range(5)):
            backward(ddp, [i])
            most = max(most, len(comm.in_flight()))
        waits = [what for what, *_ in comm.log if what == "wait"]
        ddp.finish_grad_sync()
        kinds = [kind for what, kind, _ in comm.log if what == "start"]
        assert way == "device" or kinds == ["exchange"] * 5 + ["gather"] * (0 if sharded else 5)
    assert most == {"slow host": 5, "fast host": 1, "device": 2}[way] and not comm.in_flight()
    assert bool(waits) == (way != "slow host")


def test_no_sync_holds_back_every_group_and_restores_them(monkeypatch):
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **SHARDED)
    for step in range(2):
        ddp.zero_grad_buffer()
        comm.log.clear()
        with pytest.raises(ZeroDivisionError), ddp.no_sync():
            backward(ddp)
            assert not any(group.is_last_microbatch for group in ddp.bucket_groups)
            raise ZeroDivisionError
        assert all(group.is_last_microbatch for group in ddp.bucket_groups)
        assert not comm.log
        backward(ddp)
        assert bool(comm.log) == bool(step)
        ddp.finish_grad_sync()


def test_microbatches_add_up(monkeypatch):
    ddp = wrapped(monkeypatch, FakeCommunicator(size=1), ladder(1), overlap_grad_reduce=True)
    for _ in range(2):
        ddp.zero_grad_buffer()
        with ddp.no_sync():
            ddp(torch.ones(1, 16)).sum().backward()
        ddp(torch.full((1, 16), 3.0)).sum().backward()
        ddp.finish_grad_sync()
        assert (ddp.module[0].weight.main_grad == 4.0).all()


def test_reset_while_in_flight(monkeypatch):
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **SHARDED)
    ddp.zero_grad_buffer()
    ddp.start_grad_sync()
    with refused(RuntimeError, "reset()", "being reduced", "finish_grad_sync()"):
        ddp.zero_grad_buffer()
    with refused(RuntimeError, "offload_grad_buffers()", "being reduced"):
        ddp.offload_grad_buffers()
    ddp.finish_grad_sync()
    with refused(RuntimeError, "force_all_reduce=True", "overlap_grad_reduce=False"):
        ddp.finish_grad_sync(force_all_reduce=True)
    ddp.zero_grad_buffer()
    ddp.start_grad_sync()
    ddp.start_grad_sync()
    assert len(comm.started("reduce")) == 6


def test_counts_of_a_parameter_that_is_ready_more_than_once(monkeypatch):
    """As under recomputation, which runs autograd inside of autograd."""
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **SHARDED)
    for step in range(3):
        ddp.zero_grad_buffer()
        comm.log.clear()
        backward(ddp, [2, 2, 1, 0, 2])
        assert len(comm.started("reduce")) == (3 if step else 0)
        ddp.finish_grad_sync()
    ddp.zero_grad_buffer()
    backward(ddp, [2, 2, 1])
    with refused(RuntimeError, "2 of 3 parameters", "'0.weight'", "'2.weight'", "find_unused_parameters"):
        ddp.finish_grad_sync()
    backward(ddp, [2])
    with refused(RuntimeError, "'2.weight'", "no_sync()"):
        backward(ddp, [2])


def test_gathers_start_before_reductions(monkeypatch):
    """Where a rank skips a part of the forward, and others do not, all of them have one order."""
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **GATHERS)
    for step in range(2):
        ddp.zero_grad_buffer()
        comm.log.clear()
        if step:
            ddp.module[2](torch.ones(1, 16))  # the first that is gathered, since it was the last that was reduced
            assert len(comm.started("gather")) == 2
        backward(ddp)
        ddp.finish_grad_sync()
        if not step:
            ddp.reset_param_sync_dispatch_state()
    kinds = [kind for what, kind, _ in comm.log if what == "start"]
    assert kinds == ["gather"] * 3 + ["reduce"] * 3


def test_gathers_start_before_a_step_is_left(monkeypatch):
    """Other ranks may be in a forward that waits for a layer which this rank has skipped."""
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **GATHERS, find_unused_parameters=True)
    for step in range(2):
        ddp.zero_grad_buffer()
        comm.log.clear()
        ddp.module[step](torch.ones(1, 16)).sum().backward()  # the second one is not the first in the order
        if not step:
            ddp.finish_grad_sync()
            ddp.reset_param_sync_dispatch_state()
    ddp.zero_grad_buffer()
    kinds = [kind for what, kind, _ in comm.log if what != "wait"]
    assert kinds == ["gather"] * 3 + ["step"] + ["reduce"] * 3


def test_a_step_that_an_exception_ended(monkeypatch):
    """Collectives in flight are waited for, the others start on this rank too, and the next step finds none of them."""
    comm = FakeCommunicator()
    ddp = wrapped(monkeypatch, comm, ladder(), **SHARDED)
    for step in range(4):
        ddp.zero_grad_buffer()
        if step == 1:
            comm.log.clear()
            backward(ddp, [0, 1])
            assert len(comm.started("reduce")) == 2 == len(comm.in_flight())
        if step == 2:
            assert ("leave", "step", 1) in comm.log and len(comm.started("reduce")) == 3 and not comm.in_flight()
        if step == 1:
            continue
        backward(ddp)
        ddp.finish_grad_sync()
        for group in ddp.bucket_groups:
            (bucket,) = group.buckets
            assert bucket.own_shard(bucket.grad_data)[: 8 * 16].unique().tolist() == [1.0]
