# A communicator of one process that stands for several ranks: it notes what starts and what is waited for, in which
# order, and changes memory when it is waited for, never before, as a slow network would.
import torch


class FakeWork:
    def __init__(self, comm, name, act):
        self.comm, self.name, self.act = comm, name, act

    def wait(self):
        if self.act is not None:
            self.comm.log.append(("wait", *self.name))
            act, self.act = self.act, None
            act()

    def is_completed(self):
        return self.comm.is_fast


class FakeCommunicator:
    """others: what the shards of other ranks hold now; a gather brings what they held when it started. is_fast: their
    parts are here at once."""

    def __init__(self, size=2, rank=0, is_fast=False):
        self.size, self.rank, self.group, self.is_fast = size, rank, None, is_fast
        self.log, self.others, self.numbers = [], 0.0, {}

    def scales(self, device):
        return False

    def blocks_host(self, device):
        return self.size > 1

    def _started(self, kind, tensor, act):
        name = kind, self.numbers.setdefault(tensor.data_ptr(), len(self.numbers))
        self.log.append(("start", *name))
        return FakeWork(self, name, act)

    def all_gather(self, whole, shard):
        others, own = self.others, shard.clone()

        def act():
            whole.fill_(others)
            shard.copy_(own)

        return self._started("gather", whole, act)

    def all_reduce(self, tensor, op=None):
        seen = tensor.clone()  # the other ranks have the same gradients
        return self._started("reduce", tensor, lambda: tensor.copy_(seen * self.size))

    def reduce_scatter(self, shard, whole, op=None):
        seen = shard.clone()
        return self._started("reduce", whole, lambda: shard.copy_(seen * self.size))

    def all_to_all(self, received, sent):
        own = sent.view(self.size, -1)[self.rank].clone()
        return self._started("exchange", sent, lambda: received.view(self.size, -1).copy_(own.expand(self.size, -1)))

    def broadcast(self, tensor):
        return self._started("broadcast", tensor, lambda: None)

    def all_gather_object(self, value):
        return [value] * self.size

    def all_gather_text(self, key, text):
        return [text] * self.size

    def post_message(self, step, message):
        pass

    def messages(self, step):
        return ""

    def leave(self, step, message, device):
        self.log.append(("leave", "step", step))

    def started(self, kind):
        """Numbers of the tensors of that kind of collective, in the order of their starts."""
        return [number for what, k, number in self.log if what == "start" and k == kind]

    def in_flight(self):
        names = [tuple(name) for what, *name in self.log if what == "start"]
        for what, *name in self.log:
            if what == "wait":
                names.remove(tuple(name))
        return names


def wrapped(monkeypatch, comm, module, **options):
    """A DistributedDataParallel of that module over the fake."""
    from transformer_engine.pytorch.data_parallel import DistributedDataParallel, DistributedDataParallelConfig, wrapper

    monkeypatch.setattr(wrapper, "Communicator", lambda *_: comm)
    return DistributedDataParallel(DistributedDataParallelConfig(**options), module)


def ladder(layers=3, width=16):
    """Layers of which each has its own bucket, at bucket_size=1."""
    return torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers)))
