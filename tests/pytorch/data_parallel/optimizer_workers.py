# Workers of test_optimizer.py: steps of shards beside steps of whole parameters in one process.
import copy
import itertools

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig
from transformer_engine.pytorch.data_parallel.optimizer import DistributedOptimizer

from . import pitched_workers
from .cases import backward, batch, build, each, own_part, raised, reference
from .pitched_workers import WAYS
from .wrapper_workers import WIDE

STEPS = 4


def fused_adam(params):
    return te.optimizers.FusedAdam(params, lr=1e-2, weight_decay=0.1, master_weights=True)


def remainders(params):
    return te.optimizers.FusedAdam(
        params, lr=1e-2, master_weights=True, store_param_remainders=True, exp_avg_dtype=torch.bfloat16
    )


def fused_sgd(params):
    return te.optimizers.FusedSGD(params, lr=1e-2, momentum=0.9, weight_decay=0.1)


def damped_sgd(params):
    return te.optimizers.FusedSGD(params, lr=1e-2, momentum=0.9, dampening=0.5)


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2, foreach=False)


def adam(params):
    return torch.optim.Adam(params, lr=1e-2, weight_decay=0.1, amsgrad=True, foreach=False)


def sgd(params):
    return torch.optim.SGD(params, lr=1e-2, momentum=0.9, foreach=False)


OPTIMIZERS = {f.__name__: f for f in (fused_adam, remainders, fused_sgd, damped_sgd, adamw, adam, sgd)}


def grid():
    cases = {}
    for (name, make), way in itertools.product(OPTIMIZERS.items(), WAYS):
        # torch's optimizers round 16-bit weights themselves where they are alone: beside them float32 weights tell.
        model = "main_grad" if make in (fused_adam, remainders) else "plain"
        if way != "by group" or "fused" in name or name in ("remainders", "damped_sgd"):
            cases[f"{name}, {way}"] = model, name, way
    cases["fused_adam of float32, gathers overlapped"] = "plain", "fused_adam", "gathers overlapped"
    return cases


def made(model, name, way, ranks, **given):
    module = build(model)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.25)
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=WIDE, reproducible=True, **WAYS[way]
    )
    ddp = DistributedDataParallel(config, module, calculate_per_token_loss=ranks == 3)
    optimizer = OPTIMIZERS[name](module.parameters())
    by_group = way == "by group"
    given["overlap_param_gather_with_optimizer_step"] = by_group
    return module, ddp, DistributedOptimizer(optimizer, ddp, **given)


def alone(model, name):
    """The same module, stepped whole in one process by the optimizer itself."""
    module = build(model)
    with torch.no_grad():
        for p in module.parameters():
            p.mul_(0.25)
    optimizer = OPTIMIZERS[name](module.parameters())
    if isinstance(optimizer, te.optimizers.FusedAdam):
        optimizer.use_decoupled_grad = True
    return module, optimizer


def steps(rank, ranks, model, name, way):
    """Weights, bit for bit, and the norm, within the rounding of its float32."""
    module, ddp, optimizer = made(model, name, way, ranks)
    other, its_optimizer = alone(model, name)
    for step in range(STEPS):
        # In the order of the ranks, as the reproducible sum has it; scaled behind the sum.
        total = reference(model, other, ranks, 1, step)
        grads = {n: g / (1 if ranks == 3 else ranks) for n, g in total.items()}
        for n, p in other.named_parameters():
            p.grad = p.decoupled_grad = None
            if isinstance(its_optimizer, te.optimizers.FusedAdam):
                p.decoupled_grad = grads[n]
            else:
                p.grad = grads[n]
        its_optimizer.step()
        optimizer.zero_grad()
        backward(model, ddp, batch(model, rank, 0, step), module)
        norm = optimizer.step()
        wanted = torch.stack([g.double().norm() for g in grads.values()]).norm()
        assert abs(norm.double() - wanted) <= 2.0**-22 * wanted, f"norm {norm}, wanted {wanted}"
        state = module.state_dict()  # waits for the gather
        for n, p in other.named_parameters():
            assert torch.equal(state[n], p.detach()), f"step {step}: {n}: {(state[n] - p.detach()).abs().max()}"


def plain_values(tensors):
    """float32 values of weights, of those held in FP8 too."""
    return {n: (t.dequantize() if hasattr(t, "_quantizer") else t).detach().float() for n, t in tensors}


def fp8_weights(rank, ranks, recipe):
    """Weights that are held in FP8 have the values of FusedAdam alone with whole weights; under delayed scaling, where
    that one has another history, each way has the values of the other ways, which are near."""
    results = {}
    for way in WAYS:
        torch.manual_seed(5)
        module = build(recipe, held_in_fp8=True)
        other = copy.deepcopy(module)
        for p, q in zip(module.parameters(), other.parameters()):
            value = getattr(p, "_high_precision_init_val", None)
            q.get_high_precision_init_val = lambda value=value: value
        alone = te.optimizers.FusedAdam(other.parameters(), lr=1e-2, master_weights=True, use_decoupled_grad=True)
        config = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, overlap_grad_reduce=True, bucket_size=WIDE, reproducible=True, **WAYS[way]
        )
        ddp = DistributedDataParallel(config, module, calculate_per_token_loss=ranks == 3)
        inner = te.optimizers.FusedAdam(module.parameters(), lr=1e-2, master_weights=True)
        by_group = way == "by group"
        optimizer = DistributedOptimizer(inner, ddp, overlap_param_gather_with_optimizer_step=by_group)
        assert not any(getattr(p, "_high_precision_init_val", None) is not None for p in module.parameters())
        for step in range(3):
            optimizer.zero_grad()
            backward(recipe, ddp, batch(recipe, rank, 0, step), module)
            ddp.finish_grad_sync()
            for p, q in zip(module.parameters(), other.parameters()):
                q.decoupled_grad = gathered_gradient(ddp, p)
            optimizer.step()
            alone.step()
            ddp.state_dict()  # waits for the gather
            got, wanted = plain_values(module.named_parameters()), plain_values(other.named_parameters())
            for name, value in wanted.items():
                if recipe == "delayed":
                    torch.testing.assert_close(got[name], value, rtol=2.0**-3, atol=2e-3)
                else:
                    assert torch.equal(got[name], value), f"{way}: step {step}: {name}"
            results.setdefault(step, got)
            for name, value in results[step].items():
                assert torch.equal(got[name], value), f"{way}: step {step}: {name}, beside 'whole'"
            assert step == 0 or not torch.equal(got["one.weight"], results[step - 1]["one.weight"])


def gathered_gradient(ddp, param):
    """All of a parameter's reduced gradient, from the shards of the ranks."""
    start, end, own = own_part(ddp, param)
    if not ddp.param_to_bucket_group[param].is_sharded:
        return param.main_grad.clone()
    whole = torch.zeros(param.numel(), device=own.device)
    whole[start:end] = own
    dist.all_reduce(whole)
    return whole.view(param.shape)


def clipping(rank, ranks, name):
    """Two ways of holding the weights give one result, and the gradients that are stepped have the largest norm."""
    results = []
    for way in ("whole", "sharded", "gathers overlapped"):
        module, ddp, optimizer = made("plain", name, way, ranks, clip_grad=0.5)
        for step in range(2):
            optimizer.zero_grad()
            backward("plain", ddp, batch("plain", rank, 0, step), module)
            assert optimizer.step() > 0.5
        results.append({n: p.clone() for n, p in module.state_dict().items()})
    for other in results[1:]:
        for n, p in results[0].items():  # the factor may differ by a rounding of the norm
            torch.testing.assert_close(other[n], p, rtol=1e-5, atol=1e-6)
    module, ddp, optimizer = made("plain", "sgd", "sharded", ranks, clip_grad=0.5)
    before = {n: p.clone() for n, p in module.state_dict().items()}
    optimizer.param_groups[0]["momentum"] = 0.0
    optimizer.zero_grad()
    backward("plain", ddp, batch("plain", rank, 0), module)
    optimizer.step()
    names = {n for n, _ in module.named_parameters()}
    moved = torch.stack([(p - before[n]).double().norm() for n, p in module.state_dict().items() if n in names]).norm()
    assert abs(moved - 0.5e-2) < 1e-5, moved


def skipped(rank, ranks, name):
    """found_inf of one rank skips the step of all; a count that is stepped on the device stays."""
    for way in ("whole", "sharded"):
        module, ddp, optimizer = made("plain", name, way, ranks)
        for step, skip in enumerate((True, False, True)):
            before = copy.deepcopy(module.state_dict())
            optimizer.zero_grad()
            backward("plain", ddp, batch("plain", rank, 0, step), module)
            optimizer.found_inf = torch.tensor(float(skip and rank == ranks - 1), device=here())
            optimizer.step()
            same = all(torch.equal(p, before[n]) for n, p in module.state_dict().items())
            assert same == skip, (way, step)
        assert [int(s) for s in optimizer._steps.steps] == [1]


def frozen(rank, ranks, name):
    """The optimizer of all parameters of a module, some of them frozen, is that of the others."""
    results = []
    for every in (True, False):
        module = build("plain")
        first = next(module.parameters()).requires_grad_(False)
        before = first.clone()
        params = [p for p in module.parameters() if every or p.requires_grad]
        ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=True), module)
        optimizer = DistributedOptimizer(OPTIMIZERS[name](params), ddp)
        for step in range(2):
            optimizer.zero_grad()
            backward("plain", ddp, batch("plain", rank, 0, step), module)
            optimizer.step()
        assert torch.equal(first, before)
        assert set(optimizer.state) == {p for p in module.parameters() if p.requires_grad}
        optimizer.load_state_dict(optimizer.state_dict())
        results.append({n: p.clone() for n, p in module.state_dict().items()})
    assert all(torch.equal(p, results[1][n]) for n, p in results[0].items())
    other = torch.nn.Parameter(torch.zeros(2, device=here()), requires_grad=False)
    text = raised(ValueError, lambda: DistributedOptimizer(OPTIMIZERS[name]([*params, other]), ddp))
    assert "1 parameters that no DistributedDataParallel" in text, text


def scaled(rank, ranks):
    """GradScaler: unscaled by the step, skipped and its scale halved where a gradient is not finite."""
    results = []
    for scale in (1.0, 256.0):
        module, ddp, optimizer = made("plain", "fused_adam", "sharded", ranks)
        scaler = torch.amp.GradScaler(here().type, init_scale=scale, growth_interval=1000)
        for step in range(3):
            optimizer.zero_grad()
            x = batch("plain", rank, 0, step)
            factor = torch.inf if step == 1 and rank == 0 else 1.0
            scaler.scale((ddp(x) * factor).sum()).backward()
            scaler.step(optimizer)
            scaler.update()
            assert scaler.get_scale() == scale / (2.0 if step else 1.0)
        results.append({n: p.clone() for n, p in module.state_dict().items()})
        assert [int(s) for s in optimizer._steps.steps] == [2]
    for n, p in results[0].items():
        assert torch.equal(p, results[1][n]), n


def not_finite(rank, ranks):
    """The step is skipped without a wait, and every rank raises at the next call."""
    module = build("plain")
    options = {"use_distributed_optimizer": True, "check_for_nan_in_grad": True}
    ddp = DistributedDataParallel(DistributedDataParallelConfig(**options), module)
    optimizer = DistributedOptimizer(fused_adam(module.parameters()), ddp)
    before = copy.deepcopy(module.state_dict())
    optimizer.zero_grad()
    (ddp(batch("plain", rank, 0)) * (torch.nan if rank == ranks - 1 else 1.0)).sum().backward()
    optimizer.step()
    for n, p in module.state_dict().items():
        assert torch.equal(p, before[n]), n
    text = raised(RuntimeError, optimizer.zero_grad)
    assert f"rank {ranks - 1} " in text and ("'first.weight'" in text or "'last.bias'" in text), text
    optimizer.zero_grad()


def tensor_parallel(rank, ranks):
    """One data-parallel rank, two tensor-parallel ones: marked parameters are divided, all others are counted once,
    those of a GroupedLinear that is whole on each rank too, though it marks them. A step() again reads the same
    gradients. A gradient that is not finite on one rank alone skips the step on all."""
    if ranks != 2:
        return
    own = [dist.new_group([r]) for r in range(ranks)][rank]
    groups = {"tp_group": dist.group.WORLD}, {"tp_group": dist.group.WORLD, "grad_stats_group": dist.group.WORLD}
    for given in groups:
        module = torch.nn.Sequential(*(torch.nn.Linear(4, 4, bias=False) for _ in range(3))).to(here())
        module.append(te.GroupedLinear(1, 4, 4, bias=False, device=here()))
        assert module[3].weight0.tensor_model_parallel
        module.append(te.GroupedLinear(1, 4, 4, bias=False, device=here()))
        module[4].weight0.allreduce = False  # experts of this rank
        module[0].weight.tensor_model_parallel, module[0].weight.partition_dim = True, 0
        module[1].weight.sequence_parallel = True
        ddp = DistributedDataParallel(
            DistributedDataParallelConfig(use_distributed_optimizer=True), module, process_group=own
        )
        optimizer = DistributedOptimizer(fused_sgd(module.parameters()), ddp, **given)
        optimizer.zero_grad()
        module[0].weight.main_grad.fill_(1.0 + rank)
        module[1].weight.main_grad.fill_(1.0 + rank)
        module[2].weight.main_grad.fill_(4.0)
        module[3].weight0.main_grad.fill_(5.0)
        module[4].weight0.main_grad.fill_(6.0 + rank)
        wanted = (16 * 1 + 16 * 4 + 16 * 9 + 16 * 16 + 16 * 25 + 16 * 36 + 16 * 49) ** 0.5
        for _ in range(2):
            norm = optimizer.step()
            assert abs(float(norm) - wanted) < 1e-5, norm
            assert (module[1].weight.main_grad == 3.0).all()
        assert all(s["momentum_buffer"].shape == (4, 4) for s in list(optimizer.state_dict()["state"].values())[1:4])
        before = copy.deepcopy(module.state_dict())
        for layer in (2, 3):
            optimizer.zero_grad()
            if rank == 1:
                next(module[layer].parameters()).main_grad.fill_(torch.inf)
            optimizer.found_inf = torch.zeros(1, device=here())
            optimizer.step()
            assert all(torch.equal(p, before[n]) for n, p in module.named_parameters()), layer


def without_states(rank, ranks):
    """An optimizer that keeps no states takes its own state dict, and its options with it."""
    for make, sharded in itertools.product((te.optimizers.FusedSGD, torch.optim.SGD), (True, False)):
        module = build("plain")
        ddp = DistributedDataParallel(DistributedDataParallelConfig(use_distributed_optimizer=sharded), module)
        optimizer = DistributedOptimizer(make(module.parameters(), lr=1.0), ddp)
        state = copy.deepcopy(optimizer.state_dict())
        assert not state["state"]
        optimizer.param_groups[0]["lr"] = 2.0
        optimizer.load_state_dict(state)
        assert optimizer.param_groups[0]["lr"] == 1.0
        own = DistributedOptimizer(make(module.parameters(), lr=1.0, momentum=0.5), ddp)
        refused = raised(ValueError, lambda own=own, state=state: own.load_state_dict(state))
        assert "no state of parameter" in refused, refused


def schedules(rank, ranks):
    """A scheduler of either optimizer reaches the step."""
    module, ddp, optimizer = made("plain", "fused_sgd", "sharded", ranks)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.0 if step == 0 else 1.0)
    optimizer.optimizer.param_groups[0]["weight_decay"] = 0.0
    for still in (True, False):
        before = copy.deepcopy(module.state_dict())
        optimizer.zero_grad()
        backward("plain", ddp, batch("plain", rank, 0), module)
        optimizer.step()
        scheduler.step()
        assert all(torch.equal(p, before[n]) for n, p in module.state_dict().items()) == still


OTHERS = {
    "fp8 weights, delayed": lambda rank, ranks: fp8_weights(rank, ranks, "delayed"),
    "fp8 weights, current": lambda rank, ranks: fp8_weights(rank, ranks, "current"),
    "fp8 weights, block": lambda rank, ranks: fp8_weights(rank, ranks, "block"),
    "clipping fused_adam": lambda rank, ranks: clipping(rank, ranks, "fused_adam"),
    "clipping fused_sgd": lambda rank, ranks: clipping(rank, ranks, "fused_sgd"),
    "skipped fused_adam": lambda rank, ranks: skipped(rank, ranks, "fused_adam"),
    "skipped fused_sgd": lambda rank, ranks: skipped(rank, ranks, "fused_sgd"),
    "skipped damped_sgd": lambda rank, ranks: skipped(rank, ranks, "damped_sgd"),
    "skipped adamw": lambda rank, ranks: skipped(rank, ranks, "adamw"),
    "frozen fused_adam": lambda rank, ranks: frozen(rank, ranks, "fused_adam"),
    "frozen adamw": lambda rank, ranks: frozen(rank, ranks, "adamw"),
    "scaled": scaled,
    "not finite": not_finite,
    "tensor parallel": tensor_parallel,
    "schedules": schedules,
    "without states": without_states,
}


def everything(rank, ranks):
    """{case: its traceback, or ''}."""
    cases = {name: (steps, case) for name, case in grid().items()} | pitched_workers.CASES
    cases |= {name: (case, ()) for name, case in OTHERS.items()}
    return each(rank, ranks, cases)
