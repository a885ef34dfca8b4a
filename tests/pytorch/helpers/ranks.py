# Runs a function in several processes, on one thread each, and brings back to the CPU what each of them returns: over
# gloo on the CPU, and with TE_TEST_DEVICE=cuda over NCCL, each rank on a CUDA device of its own, or (as_peers) over
# gloo, all of them on one device. The functions stand in files of their own (..._workers.py): a spawned process has to
# be able to import them.
import datetime
import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

# Neither uses multicast, which not every machine lets a process have.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# Of ranks that share one device, whose memory they see.
_ONE_DEVICE = {**_NO_MULTICAST, "TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
_here = None  # of a rank


def on_cuda():
    return os.environ.get("TE_TEST_DEVICE") == "cuda"


def here():
    """The device of this process: of a rank its own, of the test that compares what they bring the first."""
    return _here or torch.device("cuda:0" if on_cuda() else "cpu")


def backends(device):
    """Of a process group whose tensors are on `device`, which asks on the CPU what its ranks say."""
    return "gloo" if torch.device(device).type == "cpu" else "cpu:gloo,cuda:nccl"


def _main(rank, ranks, folder, worker, args, device):
    global _here
    one = device == "one cuda"
    _here = torch.device("cuda", rank) if device == "cuda" else torch.device("cuda:0" if one else device)
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun says it
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=5)  # for ranks that wait for each other in vain: not torch's half an hour
    if _here.type == "cuda":
        torch.cuda.set_device(_here)
        torch.use_deterministic_algorithms(True, warn_only=True)  # what nobody writes is NaN, as in conftest.py
        wait = datetime.timedelta(minutes=2)
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    try:
        dist.init_process_group(
            "gloo" if one else backends(device), store=store, rank=rank, world_size=ranks, timeout=wait
        )
        torch.manual_seed(1234)
        torch.save(worker(rank, *args), Path(folder) / f"result{rank}")
        if _here.type == "cuda":
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))  # over gloo: nobody goes while another one's device reads its memory
            os._exit(0)  # NCCL's communicators are not destroyed before each graph that uses them is
        dist.barrier()
    except BaseException:  # before the others hear of it
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        if _here.type == "cuda":
            os._exit(1)  # an end in good order would wait for ranks that wait for this one
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def at_most(ranks):
    """So many ranks, or on CUDA no more than there are devices; two at least."""
    return max(2, min(ranks, torch.cuda.device_count())) if on_cuda() else ranks


def must_have_devices(ranks):
    """Skips a test that wants more ranks than there are CUDA devices; says the rest what a rank's environment has."""
    found = torch.cuda.device_count()
    if found < ranks:
        import pytest

        pytest.skip(f"needs {ranks} CUDA devices, one for each rank; there are {found}")
    os.environ.update(_NO_MULTICAST)


def as_peers(worker, *args, ranks=2):
    """on_ranks() of ranks that push into each other's memory: on the CPU, or all on one CUDA device."""
    if on_cuda():
        os.environ.update(_ONE_DEVICE)
    return on_ranks(worker, *args, ranks=ranks, device="one cuda" if on_cuda() else "cpu")


def on_ranks(worker, *args, ranks=2, device=None):
    """[worker(rank, *args) of each rank]; what ranks raise is raised here, with their tracebacks. device: cpu or cuda,
    for workers that know one alone. Started again where gloo could not connect the processes of a new group and nothing
    else went wrong, which happens now and then on a machine under load."""
    device = device or here().type
    if device == "cuda":
        must_have_devices(ranks)
    for last in (False, False, True):
        with tempfile.TemporaryDirectory() as folder:
            try:
                mp.spawn(_main, args=(ranks, folder, worker, args, device), nprocs=ranks)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                told = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
                unconnected = any("connectFullMesh failed" in text for text in told)
                if last or not unconnected or not all("gloo" in text.splitlines()[-1].lower() for text in told):
                    raise RuntimeError("\n".join([f"on_ranks: {worker.__name__} of {ranks}:", *told])) from error
            else:
                paths = [Path(folder) / f"result{rank}" for rank in range(ranks)]
                return [torch.load(path, weights_only=False, map_location="cpu") for path in paths]
