# Runs a function in several processes over gloo, on one thread each, and brings back what each of them returns.
# The functions stand in rank_workers.py: a spawned process has to be able to import them.
import datetime
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _main(rank, ranks, folder, worker, args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    wait = datetime.timedelta(minutes=5)  # for ranks that wait for each other in vain: not torch's half an hour
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
    try:
        torch.manual_seed(1234)
        torch.save(worker(rank, *args), Path(folder) / f"result{rank}")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def on_ranks(worker, *args, ranks=2):
    """[worker(rank, *args) of each rank]; what a rank raises is raised here, with its traceback."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_main, args=(ranks, folder, worker, args), nprocs=ranks)
        return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(ranks)]
