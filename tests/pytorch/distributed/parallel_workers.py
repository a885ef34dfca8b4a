# The worker functions of test_parallel.py, which run on each of several ranks (ranks.py starts them). No test here: a
# worker returns what is wrong, as words, and what the tests compare.
import copy
import functools
import itertools
import pickle
from contextlib import nullcontext

import torch
import torch.distributed as dist
from ranks import here

import transformer_engine.pytorch as te
from transformer_engine.common.recipe import DelayedScaling
from transformer_engine.pytorch import functional

from .parallel_cases import HIDDEN, WIDE, Twins, collectives
from .parallel_modules import (
    BATCH,
    FP8,
    MODULES,
    OPTIONS,
    RECIPES,
    TOKENS,
    accumulating,
    columns,
    examples,
    halves,
    linear,
    mlp,
    randn,
)

TOLERANCES = {
    torch.float32: {"rtol": 1e-5, "atol": 2e-5},
    torch.bfloat16: {"rtol": 2e-2, "atol": 4e-2},
}


def products(rank, name, dtype, recipe="none", overlap="auto"):
    """Every option of a module against the module whole; kept against recomputed to the bit."""
    make, kind, pieces = MODULES[name]
    wrong, group = [], dist.group.WORLD
    x, dy = examples(kind, dtype)
    for options, bias, sequence in itertools.product(OPTIONS[name], (True, False), (True, False)):
        if RECIPES[recipe] is not None and not (bias and sequence):
            continue
        inputs, outputs = halves(sequence, kind)
        results = {}
        for recompute in (True,) if kind == "row" or not sequence else (True, False):
            keep = {"tp_overlap": overlap} | ({} if recompute else {"tp_recompute_allgather": False})
            both = Twins(
                make(dtype, bias=bias, **options),
                group,
                rank,
                inputs=inputs,
                outputs=outputs,
                pieces=pieces,
                columns=columns(options.get("parameters_split")),
                sequence_parallel=sequence,
                **keep,
            )
            what = f"{name} {options} bias {bias} sequence {sequence} recompute {recompute} {recipe}"
            if options.get("fuse_wgrad_accumulation"):
                accumulating(both.whole)
                accumulating(both.divided)

            def around():
                chosen = RECIPES[recipe]
                return nullcontext() if chosen is None else te.autocast(enabled=True, recipe=chosen)

            tolerance = TOLERANCES[dtype] if RECIPES[recipe] is None else FP8
            found, results[recompute] = both.compare(x, dy, tolerance, around)
            wrong += [f"{what}: {words}" for words in found]
        if len(results) == 2:
            for key, value in results[True].items():
                if not torch.equal(value, results[False][key]):
                    wrong.append(f"{name} {options} bias {bias}: {key} of recompute is not that of keep")
    return wrong


def saved_bytes(rank):
    """Of a column, recomputed and kept: what saved-tensor hooks see beside the weight."""
    found = {}
    for recompute in (True, False):
        module = te.Linear(
            HIDDEN,
            WIDE,
            parallel_mode="column",
            sequence_parallel=True,
            tp_group=dist.group.WORLD,
            device=here(),
            params_dtype=torch.bfloat16,
            tp_recompute_allgather=recompute,
        )
        seen = []

        def pack(t, seen=seen, module=module):
            if t.data_ptr() != module.weight.data_ptr():
                seen.append(t.nbytes)
            return t

        x = torch.randn(TOKENS, BATCH, HIDDEN, dtype=torch.bfloat16, requires_grad=True, device=here())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            module(x)
        found[recompute] = sum(seen)
    return found


def saved_by_layers(rank):
    """(layers, recomputed) -> bytes that a stack of columns and rows keeps beside its parameters, each storage once."""
    found = {}
    for layers, recompute in itertools.product((2, 16), (True, False)):
        shared = {"tp_group": dist.group.WORLD, "sequence_parallel": True, "device": here()}
        column = {"parallel_mode": "column", "tp_recompute_allgather": recompute, **shared}
        kinds = [
            (te.LayerNormLinear, HIDDEN, WIDE, column),
            (te.Linear, WIDE, HIDDEN, {"parallel_mode": "row", **shared}),
        ]
        stack = torch.nn.Sequential(*(kind(*sizes, **options) for kind, *sizes, options in kinds * layers))
        own = {p.untyped_storage().data_ptr() for p in stack.parameters()}
        seen = {}

        def pack(t, own=own, seen=seen):
            if t.untyped_storage().data_ptr() not in own:
                seen[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        x = torch.randn(TOKENS, BATCH, HIDDEN, requires_grad=True, device=here())
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            y = stack(x)
        found[layers, recompute] = sum(seen.values())
        y.sum().backward()
    return found


def copies(rank):
    """A module, its deep copy and what pickle brings back compute the same, over the same group."""
    module = te.LayerNormMLP(
        HIDDEN, WIDE, set_parallel_mode=True, sequence_parallel=True, tp_group=dist.group.WORLD, device=here()
    )
    x = torch.randn(TOKENS, BATCH, HIDDEN, device=here())
    wanted = module(x)
    others = copy.deepcopy(module), pickle.loads(pickle.dumps(module))
    return [(torch.equal(other(x), wanted), other.tp_group is dist.group.WORLD, other.tp_size) for other in others]


def compiled(rank, backend="aot_eager"):
    """Compiled against eager to the bit, and what the compiled graph keeps."""
    wrong, kept = [], {}
    for name, recompute in itertools.product(("column", "row", "norm", "mlp"), (True, False)):
        make, kind, _ = MODULES[name]
        if kind == "row" and not recompute:
            continue
        keep = {} if recompute else {"tp_recompute_allgather": False}
        module = make(torch.float32)(tp_group=dist.group.WORLD, sequence_parallel=True, **keep)
        torch._dynamo.reset()
        traced = torch.compile(module, backend=backend, fullgraph=True)
        x, _ = examples(kind, torch.float32)
        if kind == "row":
            x = x.chunk(dist.get_world_size(), -1)[rank].contiguous()
        results = []
        for call in (module, traced):
            seen = []
            leaf = x.clone().requires_grad_()
            with torch.autograd.graph.saved_tensors_hooks(lambda t, seen=seen: seen.append(t.shape) or t, lambda t: t):
                y = call(leaf)
            module.zero_grad(set_to_none=True)
            torch.manual_seed(3)
            y.backward(torch.randn_like(y))
            results.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
        for i, (one, other) in enumerate(zip(*results)):
            if not torch.equal(one, other):
                wrong.append(f"{name} recompute {recompute}: result {i} differs")
        whole = x.shape[0] * dist.get_world_size()
        kept[name, recompute] = any(s[0] == whole and s[-1] == HIDDEN for s in seen if len(s) == 3)
    return wrong, kept


def refusals(rank):
    """The errors of bad input on this rank, and whether the modules work afterwards. Ranks with different arguments are
    refused on the CPU only, where the group can compare them too."""
    said = []
    world = dist.group.WORLD

    def note(what):
        try:
            what()
            said.append("nothing")
        except Exception as error:
            said.append(f"{type(error).__name__}: {error}")

    note(lambda: te.Linear(32, 33, parallel_mode="column", tp_group=world, device=here()))
    note(lambda: te.Linear(33, 32, parallel_mode="row", tp_group=world, device=here()))
    note(lambda: te.LayerNormMLP(32, 33, tp_group=world, device=here()))
    note(
        lambda: te.Linear(
            32, 32, parallel_mode="column", tp_group=world, parameters_split={"a": 31, "b": 1}, device=here()
        )
    )
    note(lambda: te.Linear(32, 32, parallel_mode="row", tp_group=world, tp_recompute_allgather=False, device=here()))
    note(lambda: te.Linear(32, 32, tp_overlap="fast", device=here()))
    note(lambda: te.LayerNormLinear(32, 32, parallel_mode="row", tp_group=world, device=here()))
    without = te.Linear(32, 32, parallel_mode="column", tp_size=2, device=here())
    note(lambda: without(randn(4, 32)))
    row = te.Linear(32, 32, parallel_mode="row", sequence_parallel=True, tp_group=world, device=here())
    note(lambda: row(randn(5, 16)))
    note(lambda: row(randn(16)))
    note(lambda: row(randn(4, 32)))
    there = te.Linear(32, 32, parallel_mode="row", sequence_parallel=True, tp_group=world, device="cpu")
    note(lambda: there(torch.randn(4 + 2 * rank, 16)))
    note(lambda: row.set_tensor_parallel_group(dist.new_group([rank], use_local_synchronization=True)))
    works = row(randn(4, 16)).shape == there(torch.randn(4, 16)).shape == (2, 32)
    gone = dist.new_group([0, 1])
    lost = te.Linear(32, 32, parallel_mode="row", sequence_parallel=True, tp_group=gone, device=here())
    lost(randn(4, 16))
    dist.destroy_process_group(gone)
    note(lambda: lost(randn(4, 16)))
    lost.set_tensor_parallel_group(world)
    works = works and lost(randn(4, 16)).shape == (2, 32)
    return said, works


def nothing_and_one(rank):
    """Zero tokens, and a group of one rank against the module without a group, to the bit."""
    alone = dist.new_group([rank], use_local_synchronization=True)
    wrong = []
    for name, (make, kind, _) in MODULES.items():
        module = make(torch.float32)(tp_group=dist.group.WORLD, sequence_parallel=True)
        x, _ = examples(kind, torch.float32)
        x = x[:0, :, : x.shape[-1] // 2] if kind == "row" else x[:0]
        leaf = x.clone().requires_grad_()
        module(leaf).sum().backward()
        if leaf.grad.shape != leaf.shape or any(p.grad.count_nonzero() for p in module.parameters()):
            wrong.append(f"{name}: zero tokens")
        both = Twins(make(torch.float32), alone, 0, inputs=None, outputs=None, sequence_parallel=True)
        x, dy = examples(kind, torch.float32)
        found, _ = both.compare(x, dy, {"rtol": 0, "atol": 0})
        wrong += [f"{name}, a group of one: {words}" for words in found]
    return wrong


def frozen(rank):
    """A backward without wanted gradients communicates nothing: the collectives of a backward, by name."""
    counts = {}
    for name, freeze in itertools.product(("column", "row"), ("nothing", "weight", "input", "both")):
        make, kind, _ = MODULES[name]
        module = make(torch.float32, bias=False)(tp_group=dist.group.WORLD, sequence_parallel=True)
        module.weight.requires_grad_(freeze not in ("weight", "both"))
        x, _ = examples(kind, torch.float32)
        x = x.chunk(2, -1)[rank].contiguous() if kind == "row" else x
        x.requires_grad_(freeze not in ("input", "both"))
        y = module(x)
        if not y.requires_grad:
            counts[name, freeze] = []
            continue
        counts[name, freeze] = collectives(functools.partial(y.backward, torch.ones_like(y)))
    return counts


def all_products(rank, dtype, recipe):
    return [words for name in MODULES for words in products(rank, name, dtype, recipe)]


def functions(rank):
    """column_linear and row_linear against the modules, to the bit, eager and compiled."""
    wrong, group = [], dist.group.WORLD
    for mode, sequence, given, traced in itertools.product(
        ("column", "row"), (True, False), (group, None), (False, True)
    ):
        module = linear(mode, torch.float32)(tp_group=group, sequence_parallel=sequence)
        call = te.distributed.column_linear if mode == "column" else te.distributed.row_linear
        if traced:
            torch._dynamo.reset()
            call = torch.compile(call, backend="aot_eager", fullgraph=True)
        x, _ = examples(mode, torch.float32)
        x = x.chunk(2, -1)[rank].contiguous() if mode == "row" else x
        results = []
        weight, bias = (p.detach().clone().requires_grad_() for p in (module.weight, module.bias))
        options = {"weight": weight, "bias": bias, "group": given, "sequence_parallel": sequence}
        for function in (module, functools.partial(call, **options)):
            leaf = x.clone().requires_grad_()
            module.zero_grad(set_to_none=True)
            y = function(leaf)
            torch.manual_seed(1)
            y.backward(torch.randn_like(y))
            made = (module.weight, module.bias) if function is module else (weight, bias)
            results.append([y.detach(), leaf.grad, *(p.grad for p in made)])
        wrong += [
            f"{mode} sequence {sequence} traced {traced}: {i}"
            for i, (one, other) in enumerate(zip(*results))
            if not torch.equal(one, other)
        ]
    try:
        te.distributed.row_linear(randn(3, 4), randn(5, 4), sequence_parallel=True)
        wrong.append("three tokens on two ranks are not refused")
    except ValueError as error:
        if not str(error).startswith("row_linear: argument 'inp' has 3 tokens"):
            wrong.append(str(error))
    return wrong


def another_group(rank):
    """The groups that a module uses after tp_group was set: the names of its group and of the groups of its TPComms,
    and the group that shares the scale of the gathered tensor."""
    module = linear("column", torch.float32)(tp_group=dist.group.WORLD, sequence_parallel=True)
    x, _ = examples("column", torch.float32)
    found = []
    for _ in range(2):
        with te.autocast(enabled=True, recipe=RECIPES["delayed"]):
            module(x)
        used = {tp_comm.group for tp_comm in module.runtime.tp_comms.values()}
        found.append((module.tp_group.group_name, used, module.fp8_meta["scaling_fwd"].gathered[0]))
        module.tp_group = dist.new_group(list(range(dist.get_world_size())))
    return found


def calibrated(rank):
    """Scales of an MLP's forward that calibrating finds, whole and divided; the largest activation is of a token of one
    rank and a column of another."""
    torch.manual_seed(6)
    both = Twins(
        mlp(torch.float32, activation="relu"), dist.group.WORLD, rank, inputs=0, outputs=0, sequence_parallel=True
    )
    x, _ = examples("both", torch.float32)
    with torch.no_grad():
        both.whole.fc1_weight[-1] = 9 * both.whole.layer_norm_bias.new_tensor(x[0, 0].sign().tolist())
        both.divided.fc1_weight.copy_(both.of("fc1_weight", both.whole.fc1_weight))
    scales = []
    for module, inp in ((both.whole, x), (both.divided, both.tokens(x, 0))):
        with te.autocast(enabled=False, calibrating=True, recipe=DelayedScaling()):
            module(inp)
        scales.append(module.fp8_meta["scaling_fwd"].scale[[0, 1, 3, 4]])  # of inputs and weights
    return scales


def in_rank_order(rank):
    """Whether a row's parts are added up in the order of the ranks; and how often a checkpointed MLP gathers."""
    ranks, group = dist.get_world_size(), dist.group.WORLD
    torch.manual_seed(rank)
    x, weight = randn(4 * ranks, 8), randn(5, 8)
    parts = [torch.empty(4 * ranks, 5, device=here()) for _ in range(ranks)]
    dist.all_gather(parts, functional.linear(x, weight))
    wanted = sum(parts[1:], parts[0]).chunk(ranks)[rank]
    given = te.distributed.row_linear(x, weight, sequence_parallel=True)
    module = te.LayerNormMLP(
        HIDDEN, WIDE, checkpoint=True, set_parallel_mode=True, sequence_parallel=True, tp_group=group, device=here()
    )
    sent = collectives(lambda: module(randn(4, HIDDEN).requires_grad_()).sum().backward())
    return torch.equal(given, wanted), sent.count("c10d::_allgather_base_")


def on_streams_of_their_own(rank):
    """(mode, sequence) -> the collectives of a forward and backward that run beside what the caller does next, by name:
    those that do not tell their backend that they are awaited at once."""
    found = {}
    for mode, sequence in itertools.product(("column", "row"), (True, False)):
        module = linear(mode, torch.float32)(tp_group=dist.group.WORLD, sequence_parallel=sequence)
        x, _ = examples(mode, torch.float32)
        x = (x.chunk(2, -1)[rank].contiguous() if mode == "row" else x).requires_grad_()
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
            module(x).sum().backward()
        events = [e for e in seen.profiler.kineto_results.events() if e.name().startswith("c10d::")]
        events = [e for e in events if "long int" not in e.dtypes()]  # by which ranks agree on the CPU
        told = {e.name(): [flag for flag in e.concrete_inputs() if isinstance(flag, bool)] for e in events}
        found[mode, sequence] = [name for name, (aside,) in told.items() if aside]
    return found
