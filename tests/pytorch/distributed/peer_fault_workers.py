# Ranks over channels to peers, of which one dies, is stopped, or does something else than the others. No test here: a
# worker writes what it met into a file (test_peer_faults.py starts them, since a rank that is killed brings nothing
# back).
import datetime
import json
import os
import signal
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from ranks import backends, go_to, here, must_have_devices, on_cuda, peers_share_a_device

from transformer_engine.pytorch import _C, distributed
from transformer_engine.pytorch.distributed.peer import CommTimeout

from .peer_workers import example, made, memory_of_channels

TOKENS = 32


def start(folder, ranks, name):
    store = dist.FileStore(str(Path(folder) / name), ranks[1])
    wait = datetime.timedelta(seconds=60)
    by = backends(here(), peers_share_a_device(ranks[1]))
    dist.init_process_group(by, store=store, rank=ranks[0], world_size=ranks[1], timeout=wait)


def note(folder, me, **found):
    path = Path(folder) / f"met{me}"
    path.with_suffix(".part").write_text(json.dumps(found))
    path.with_suffix(".part").rename(path)


def run(module, x, made_so_far=None):
    leaf = x.clone().requires_grad_()
    y = module(leaf)
    if made_so_far is not None:
        made_so_far[:] = [y.detach()]
    y.backward(torch.ones_like(y))
    if made_so_far is not None:
        made_so_far.append(leaf.grad)
    return y.detach(), leaf.grad


def meet(module, x, steps=100000):
    """Steps until a CommTimeout: it, when, and whether what stood before it is NaN. In a capture nothing is read."""
    before = []
    for _ in range(steps):
        try:
            run(module, x, before)
        except CommTimeout as error:
            torch.cuda.synchronize() if x.is_cuda else None
            when = time.monotonic()
            nan = any(bool(torch.isnan(t).all()) for t in before)
            return {
                "op": error.op,
                "peer": error.peer,
                "rank": error.rank,
                "step": error.step,
                "when": when,
                "words": str(error),
                "nan": nan,
            }
    return {"words": "nothing was raised"}


def one(rank, ranks, folder, name, timeout):
    os.environ["TE_COMM_TIMEOUT_S"] = str(timeout)
    torch.set_num_threads(1)
    if on_cuda():
        go_to(f"cuda:{0 if peers_share_a_device(ranks) else rank}")
    start(folder, (rank, ranks), "store")
    WORKERS[name](rank, ranks, folder)
    os._exit(0)  # destroying the group would wait for the dead rank


def note_when(folder):
    """When rank 1 leaves the others alone."""
    if on_cuda():
        torch.cuda.synchronize()
    (Path(folder) / "when").write_text(str(time.monotonic()))


def behind_sound_steps(kind, rank, folder):
    """A layer that has run some, and its input; rank 1 goes now."""
    module, x = made(kind, "chunked", torch.float32), example(kind, rank, torch.float32, TOKENS)
    for _ in range(3):
        run(module, x)
    if rank == 1:
        note_when(folder)
    return module, x


def killed(rank, ranks, folder):
    module, x = behind_sound_steps("norm", rank, folder)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    found = meet(module, x)
    again = meet(module, x, 1)  # it stays so
    # The others go on without it.
    dist.destroy_process_group()
    left = [r for r in range(ranks) if r != 1]
    start(folder, (left.index(rank), len(left)), "another")
    module = made("norm", "chunked", torch.float32)
    y, dx = run(module, x)
    note(folder, rank, **found, again=again["words"], sound=bool(torch.isfinite(y).all() and torch.isfinite(dx).all()))


def stopped(rank, ranks, folder):
    module, x = behind_sound_steps("row", rank, folder)
    if rank == 1:
        time.sleep(0.5)  # the test stops this process meanwhile
    found = meet(module, x)
    note(folder, rank, **found)  # the test waits for it before it lets the other one go on
    dist.destroy_process_group()
    os.environ["TE_COMM_TIMEOUT_S"] = "30"
    start(folder, (rank, ranks), "another")
    note(folder, rank, **found, again=wrong_in_a_new_group(rank))


def wrong_in_a_new_group(rank):
    """The differences from the same layer over the new group, which has no channel."""
    before = _C.set_cpu_products("loop")
    x = example("norm", rank, torch.float32, TOKENS)
    wanted, got = (run(made("norm", overlap, torch.float32), x) for overlap in ("off", "chunked"))
    _C.set_cpu_products(before)
    return [name for name, a, b in zip(("y", "dx"), wanted, got) if not torch.equal(a, b)]


def other_shapes(rank, ranks, folder):
    module = made("column", "chunked", torch.float32)
    run(module, example("column", rank, torch.float32, 64))
    note(folder, rank, **meet(module, example("column", rank, torch.float32, 32 + 16 * rank)))


def other_emptiness(rank, ranks, folder):
    """Rank 1 has no tokens."""
    module = made("column", "chunked", torch.float32)
    run(module, example("column", rank, torch.float32, TOKENS))
    run(module, example("column", rank, torch.float32, 0))
    note(folder, rank, **meet(module, example("column", rank, torch.float32, TOKENS * (1 - rank))))


def other_gradients(rank, ranks, folder):
    module = made("column", "chunked", torch.float32)
    x = example("column", rank, torch.float32, TOKENS)
    run(module, x)
    module.weight.requires_grad_(rank == 0)
    note(folder, rank, **meet(module, x))


def other_growth(rank, ranks, folder):
    module = made("column", "chunked", torch.float32)
    note(folder, rank, **meet(module, example("column", rank, torch.float32, 64 * (1 + 7 * rank))))


def sleepy(rank, ranks, folder):
    """A rank that is late now and then, within the deadline: the same bits."""
    serial, module = made("mlp", "off", torch.float32), made("mlp", "chunked", torch.float32)
    module.load_state_dict(serial.state_dict())
    torch.manual_seed(rank)
    wrong = 0
    _C.set_cpu_products("loop")
    for again in range(30):
        x = example("mlp", rank, torch.float32, TOKENS, again)
        wanted = run(serial, x)
        time.sleep(float(torch.rand(1)) * 0.02)
        got = run(module, x)
        wrong += not all(torch.equal(a, b) for a, b in zip(got, wanted))
    note(folder, rank, wrong=wrong)


def _dies_in_exchange(what, rank, folder):
    """Rank 1 dies while a slot grows. The ranks exchange in steps its size, where its memory is, and that they mapped
    it."""
    module = made("column", "chunked", torch.float32)
    run(module, example("column", rank, torch.float32, TOKENS))
    if rank == 1:
        note_when(folder)
        exchange = distributed.peer._Meeting._exchange

        def dies(meeting, step, value):
            if step.endswith(what):
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(meeting, step, value)

        distributed.peer._Meeting._exchange = dies
    found = meet(module, example("column", rank, torch.float32, 8 * TOKENS))
    alive = memory_of_channels()
    del module
    dist.destroy_process_group()
    note(folder, rank, **found, alive=alive, left=memory_of_channels())


def dies_while_memory_grows(rank, ranks, folder):
    """A rank that the others wait for in Python."""
    _dies_in_exchange("", rank, folder)


def dies_with_memory_made(rank, ranks, folder):
    """Rank 1 dies after it made its memory, and before it sends the memory's path."""
    _dies_in_exchange(" in", rank, folder)


def dies_while_ranks_meet(rank, ranks, folder):
    """Rank 1 dies at the first call, directly after it has sent its location."""
    module, x = made("column", "chunked", torch.float32), example("column", rank, torch.float32, TOKENS)
    if rank == 1:
        exchange = distributed.peer._Meeting._exchange

        def dies(meeting, step, value):
            if step != "here":
                note_when(folder)
                os.kill(os.getpid(), signal.SIGKILL)
            return exchange(meeting, step, value)

        distributed.peer._Meeting._exchange = dies
    note(folder, rank, **meet(module, x))


WORKERS = {
    f.__name__: f
    for f in (
        killed,
        stopped,
        other_shapes,
        other_gradients,
        other_growth,
        other_emptiness,
        sleepy,
        dies_while_memory_grows,
        dies_while_ranks_meet,
        dies_with_memory_made,
    )
}


def starts(name, folder, ranks, timeout):
    if on_cuda():
        must_have_devices(ranks, peers_share_a_device(ranks))
    context = mp.get_context("spawn" if on_cuda() else "forkserver")  # which has imported what they need: ranks.py
    each = [context.Process(target=one, args=(rank, ranks, str(folder), name, timeout)) for rank in range(ranks)]
    for process in each:
        process.start()
    return each


def ends(each, folder, seconds=180):
    """The results of each rank; None for a rank that wrote none."""
    until = time.monotonic() + seconds
    for process in each:
        process.join(max(0.1, until - time.monotonic()))
    late = [process for process in each if process.is_alive()]
    for process in late:
        process.kill()
    assert not late, "a rank did not end"
    paths = [Path(folder) / f"met{rank}" for rank in range(len(each))]
    return [json.loads(path.read_text()) if path.exists() else None for path in paths]
