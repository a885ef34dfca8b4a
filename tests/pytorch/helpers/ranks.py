# Runs a function in several processes, on one thread each, and brings back to the CPU what each of them returns: over
# gloo on the CPU, and with TE_TEST_DEVICE=cuda over NCCL, each rank on a CUDA device of its own. NCCL refuses two ranks
# on one device; TE_TEST_BACKEND=gloo beside it has gloo carry the CUDA tensors of any number of ranks on the first one.
# The functions are in files of their own (..._workers.py): a spawned process has to be able to import them.
import contextlib
import datetime
import faulthandler
import multiprocessing
import os
import tempfile
import traceback
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.multiprocessing as mp

# Disables multicast of both: not every machine allows it to a process.
_NO_MULTICAST = {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
# Torch's symmetric memory between processes that share a device.
_ONE_DEVICE = {"TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES": "1"}
# Modules that the fork server of CPU processes imports once, before it forks them.
_IMPORTED = (
    "torch._dynamo", "torch.distributed.checkpoint", "torch.distributed.fsdp", "torch.distributed.tensor",
    "transformer_engine.pytorch",
)  # fmt: skip
multiprocessing.set_forkserver_preload(list(_IMPORTED))
_here = None  # of a rank


def on_cuda():
    return os.environ.get("TE_TEST_DEVICE") == "cuda"


def share_a_device():
    """Whether ranks on CUDA are all on the first device, over gloo."""
    chosen = os.environ.get("TE_TEST_BACKEND", "nccl")
    if chosen not in ("gloo", "nccl"):
        raise ValueError(f"TE_TEST_BACKEND={chosen!r}: wanted gloo or nccl")
    return chosen == "gloo"


def here():
    """The device of this process: of a rank its own, of the test that compares what they bring the first."""
    return _here or torch.device("cuda:0" if on_cuda() else "cpu")


def ranks_compare():
    """Whether ranks say what they bring before it is sent: over gloo."""
    return here().type == "cpu" or share_a_device()


def making_tensors_here():
    """A context for a worker that names no device: new tensors are made on this rank's device."""
    return contextlib.nullcontext() if here().type == "cpu" else here()


def backends(device, shared=None):
    """The backends of a process group whose tensors are on `device`; on the CPU its ranks compare their calls."""
    shared = share_a_device() if shared is None else shared
    return "gloo" if torch.device(device).type == "cpu" or shared else "cpu:gloo,cuda:nccl"


def _gathered_by_gloo(tensor, gather_dim, group, tag=""):
    """The gather of DTensor and FSDP2: torch's gloo has no such gather of CUDA tensors, and ends the process (it reads
    their addresses on the host). This gather works."""
    name = funcol._resolve_group_name(group, tag)
    group = dist.distributed_c10d._resolve_process_group(name)
    whole = tensor.new_empty((group.size() * tensor.shape[0], *tensor.shape[1:]))
    dist.all_gather_into_tensor(whole, tensor, group=group)
    return torch.cat(whole.chunk(group.size()), gather_dim) if gather_dim else whole


def go_to(device):
    """Of a process that is a rank, and was not started here."""
    global _here
    _here = torch.device(device)
    if _here.type == "cuda":
        torch.cuda.set_device(_here)


def _main(rank, environment, ranks, folder, worker, args, device, shared):
    global _here
    os.environ.update(environment)  # that of the test: the server's is older
    _here = torch.device("cpu") if device == "cpu" else torch.device(device, 0 if shared else rank)
    os.environ["LOCAL_RANK"] = str(rank)  # as torchrun sets it
    faulthandler.enable()
    torch.set_num_threads(1)
    wait = datetime.timedelta(minutes=5)  # for ranks that wait for each other in vain: not torch's half an hour
    if _here.type == "cuda":
        torch.cuda.set_device(_here)
        torch.use_deterministic_algorithms(True, warn_only=True)  # unwritten memory is NaN, as in conftest.py
        wait = datetime.timedelta(minutes=2)
        if shared:
            funcol.all_gather_tensor = _gathered_by_gloo
    store = dist.FileStore(str(Path(folder) / "store"), ranks)
    try:
        dist.init_process_group(backends(device, shared), store=store, rank=rank, world_size=ranks, timeout=wait)
        torch.manual_seed(1234)
        torch.save(worker(rank, *args), Path(folder) / f"result{rank}")
        if _here.type == "cuda":
            torch.cuda.synchronize()
            dist.all_reduce(torch.zeros(1))  # over gloo: no rank ends while another one's device reads its memory
            os._exit(0)  # NCCL's communicators are not destroyed before each graph that uses them is
        dist.barrier()
    except BaseException:  # the file is written before other ranks fail too
        (Path(folder) / f"error{rank}").write_text(traceback.format_exc())
        if _here.type == "cuda":
            os._exit(1)  # an end in good order would wait for ranks that wait for this one
        raise
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def at_most(ranks):
    """So many ranks, or on CUDA devices of their own no more than there are; two at least."""
    return max(2, min(ranks, torch.cuda.device_count())) if on_cuda() and not share_a_device() else ranks


def must_have_devices(ranks, shared=None):
    """Skips a test that needs more ranks than there are CUDA devices; otherwise sets the environment of the ranks."""
    found = torch.cuda.device_count()
    if share_a_device() if shared is None else shared:
        os.environ.update(_ONE_DEVICE)
    elif found < ranks:
        import pytest

        pytest.skip(f"needs {ranks} CUDA devices, one for each rank; there are {found} (TE_TEST_BACKEND=gloo: one)")
    os.environ.update(_NO_MULTICAST)


def must_be_captured():
    """Skips a test whose collectives are captured."""
    if share_a_device():
        import pytest

        pytest.skip("gloo cannot be captured in a CUDA graph")


def peers_share_a_device(ranks):
    """Ranks that push into each other's memory may all be on one CUDA device, where there are not enough."""
    return share_a_device() or torch.cuda.device_count() < ranks


def as_peers(worker, *args, ranks=2):
    """on_ranks() of ranks that push into each other's memory."""
    return on_ranks(worker, *args, ranks=ranks, shared=peers_share_a_device(ranks))


def on_ranks(worker, *args, ranks=2, device=None, shared=None):
    """[worker(rank, *args) of each rank]; errors of ranks are raised here, with their tracebacks. device: cpu or cuda,
    for workers of one kind of device. shared: whether they share one CUDA device, by default from TE_TEST_BACKEND.
    Started again where gloo could not connect the processes of a new group and nothing else went wrong, which happens
    now and then on a machine under load."""
    device = device or here().type
    shared = share_a_device() if shared is None else shared
    if device == "cuda":
        must_have_devices(ranks, shared)
    for last in (False, False, True):
        with tempfile.TemporaryDirectory() as folder:
            try:
                given = dict(os.environ), ranks, folder, worker, args, device, shared
                # Their common imports take longer than most workers. A process that has CUDA cannot fork.
                how = "spawn" if device == "cuda" else "forkserver"
                mp.start_processes(_main, args=given, nprocs=ranks, start_method=how)
            except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
                told = [path.read_text() for path in sorted(Path(folder).glob("error*"))]
                unconnected = any("connectFullMesh failed" in text for text in told)
                if last or not unconnected or not all("gloo" in text.splitlines()[-1].lower() for text in told):
                    raise RuntimeError("\n".join([f"on_ranks: {worker.__name__} of {ranks}:", *told])) from error
            else:
                paths = [Path(folder) / f"result{rank}" for rank in range(ranks)]
                return [torch.load(path, weights_only=False, map_location="cpu") for path in paths]


class Raised(str):
    """The traceback of one worker of several."""


def one_by_one(rank, workers):
    """{name of a worker: its result}; an error becomes its traceback, which ends the tests of that worker."""
    found = {}
    for worker in workers:
        try:
            found[worker.__name__] = worker(rank)
        except Exception:
            found[worker.__name__] = Raised(traceback.format_exc())
    return found


class Found(dict):
    """The results of each rank, by name."""

    def __getitem__(self, name):
        every = super().__getitem__(name)
        if any(isinstance(brought, Raised) for brought in every):
            raised = [  # in order: a worker that one rank left alone can make each one after it fail
                f"{worker}, rank {rank}: {brought}"
                for worker, results in self.items()
                for rank, brought in enumerate(results)
                if isinstance(brought, Raised)
            ]
            raise AssertionError("\n".join(raised))
        return every


def found_by(worker):
    """A module's fixture: what each of two ranks brings, by the names in the dictionary that worker(rank) returns."""
    import pytest

    @pytest.fixture(scope="module")
    def found():
        ranks = on_ranks(worker)
        return Found({name: [rank[name] for rank in ranks] for name in ranks[0]})

    return found
