# The hashes that same_bits.py compares: of tensors, of other results of a call, and of tensors in saved-tensor hooks.
import hashlib
import io

import torch


def digest(*parts):
    h = hashlib.blake2b(digest_size=8)
    for part in parts:
        h.update(part if isinstance(part, bytes) else str(part).encode())
        h.update(b"|")
    return h.hexdigest()


def content(t):
    return t.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def plain_parts(t):
    """The plain tensors of a tensor, by name: its own, or those of a quantized one."""
    if hasattr(t, "__tensor_flatten__"):
        with torch.no_grad():
            return {name: getattr(t, name) for name in t.__tensor_flatten__()[0]}
    return {"": t}


def told(value):
    """A hash of anything that a state is made of."""
    if isinstance(value, torch.Tensor):
        own = [type(value).__name__, value.dtype, tuple(value.shape), value.requires_grad]
        own += [] if hasattr(value, "__tensor_flatten__") else [value.stride()]
        for name, part in plain_parts(value).items():
            own += [name, part.dtype, tuple(part.shape), content(part)]
        return digest(*own)
    if isinstance(value, io.BytesIO):
        return digest(value.getvalue())
    if isinstance(value, dict):
        return digest(*(f"{key}={told(value[key])}" for key in sorted(value, key=str)))
    if isinstance(value, (list, tuple)):
        return digest(type(value).__name__, *map(told, value))
    if isinstance(value, (str, int, float, bool, bytes, type(None), torch.dtype)):
        return digest(value)
    fields = [name for name in ("scale", "scale_inv", "amax_history") if hasattr(value, name)]
    return digest(type(value).__name__, *(told(getattr(value, name)) for name in fields))


class Saved:
    """The tensors that saved-tensor hooks see, in order, each with its storage's number and size."""

    def __init__(self):
        self.entries, self.storages, self._alive = [], {}, []

    def pack(self, t):
        for name, part in plain_parts(t).items():
            storage = part.untyped_storage()
            number = len(self.storages)
            number, size = self.storages.setdefault(storage.data_ptr() or -number - 1, (number, storage.nbytes()))
            self._alive.append(part)  # no other storage takes its address
            own = digest(type(t).__name__, name, part.dtype, tuple(part.shape), part.stride(), size, content(part))
            self.entries.append((own, number, part.storage_offset()))
        return t

    def hooks(self):
        return torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t)

    def results(self):
        return {
            "saved in order": digest(*self.entries),
            "saved in any order": digest(*sorted(own for own, _, _ in self.entries)),
            "saved bytes": str(sum(size for _, size in self.storages.values())),
        }
