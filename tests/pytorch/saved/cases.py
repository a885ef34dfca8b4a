# A StorageHandler that takes float32 tensors above a size, for the tests of saved-tensor hooks. No test is here.
import torch
from support import assert_same_bits
from torch.autograd.graph import saved_tensors_hooks

from transformer_engine.pytorch import saved as saved_hooks


class Copied(saved_hooks.PackedStorage):
    """A storage whose bytes are copied when its handler offloads, and restored into separate memory."""

    status, back = "copied", "nothing: it was copied"
    copy = None

    def leave(self):
        self.copy = self.tensor.new_empty(0, dtype=torch.uint8).set_(self.tensor.untyped_storage()).clone()
        self.let_go()

    def restore(self):
        self.client.restored += 1
        return self.copy


class Toy(saved_hooks.StorageHandler):
    """Takes float32 tensors of more than n elements."""

    def __init__(self, n=0):
        super().__init__()
        self.n, self.offered, self.restored, self.all = n, [], 0, 0

    def take(self, tensor):
        self.offered.append((tensor.dtype, tensor.numel()))
        if tensor.dtype is not torch.float32 or tensor.numel() <= self.n:
            return None
        memory = Copied(tensor)
        memory.client = self
        self.all += 1
        return memory

    def leave(self):
        for memory in self.taken:
            if memory.tensor is not None and not memory.stays:
                memory.leave()


class Noted:
    """Foreign hooks that record the tensors that they pack and unpack."""

    def __init__(self):
        self.packed, self.unpacked = [], 0

    def pack(self, t):
        self.packed.append((t.dtype, t.numel(), isinstance(t, torch.nn.Parameter)))
        return t.detach().clone()

    def unpack(self, t):
        self.unpacked += 1
        return t

    def hooks(self):
        return saved_tensors_hooks(self.pack, self.unpack)


def same(results, expected):
    for i, (a, b) in enumerate(zip(results, expected, strict=True)):
        assert_same_bits(a, b, f"result {i}")
