# Runs a function in several processes over gloo, on one thread each, and brings back what each of them returns.
# The functions stand in rank_workers.py: a spawned process has to be able to import them.
import datetime
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp


def _main(rank, ranks, folder, worker, args):
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    wait = datetime.timedelta(minutes=5)  # for ranks that wait for each other in vain: not torch's half an hour
    try:
        dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=wait)
        torch.manual_seed(1234)
        torch.save(worker(rank, *args), Path(folder) / f"result{rank}")
        dist.barrier()
    except BaseException:  # before the others hear of it
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def on_ranks(worker, *args, ranks=2):
    """[worker(rank, *args) of each rank]; what ranks raise is raised here, with their tracebacks. Started again where
    gloo could not connect the processes of a new group and nothing else went wrong, which happens now and then on a
    machine under load."""
    for last in (False, False, True):
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(_main, args=(ranks, folder, worker, args), nprocs=ranks)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                told = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
                unconnected = any("connectFullMesh failed" in text for text in told)
                if last or not unconnected or not all("gloo" in text.splitlines()[-1].lower() for text in told):
                    raise RuntimeError("\n".join([f"on_ranks: {worker.__name__} of {ranks}:", *told])) from error
            else:
                return [torch.load(Path(folder) / f"result{rank}", weights_only=False) for rank in range(ranks)]
