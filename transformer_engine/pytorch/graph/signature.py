"""What a captured callable is called with: the form of its arguments, and the check of a call against it. Copies
nothing and changes nothing."""

from collections.abc import Mapping

import torch
from torch.utils._pytree import keystr, tree_flatten, tree_flatten_with_path

OP = "make_graphed_callables"
REPLAY_KEYWORDS = ("is_first_microbatch", "cuda_graph_stream", "cuda_graph_event")


def _strides(t_shape: torch.Size, t_stride: tuple[int, ...]) -> tuple[int, ...]:
    """Those that say where elements are: a dimension of one has none."""
    return tuple(step for size, step in zip(t_shape, t_stride) if size > 1)


def _described(t: torch.Tensor) -> str:
    grad = ", requires_grad" if t.requires_grad else ""
    return f"{t.dtype} {list(t.shape)} with strides {list(t.stride())} on {t.device}{grad}"


class Signature:
    """args and kwargs of one sample: where tensors stand, of what form, and the constants beside them."""

    def __init__(self, label: str, args: tuple, kwargs: Mapping[str, object]) -> None:
        self.label = label
        paths, self.spec = tree_flatten_with_path((tuple(args), dict(kwargs)))
        self.leaves = [leaf for _, leaf in paths]
        self.names = [self._name(path) for path, _ in paths]
        self.slots = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        for i, (path, leaf) in enumerate(paths):
            if path[0].idx == 0 and not isinstance(leaf, torch.Tensor):
                raise ValueError(
                    f"{OP}: argument 'sample_args' of {label} has {leaf!r} at {self.names[i]}, wanted tensors alone; "
                    "pass what is none by name, in 'sample_kwargs'."
                )
            if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 and 0 in _strides(leaf.shape, leaf.stride()):
                raise ValueError(
                    f"{OP}: sample {self.names[i]} of {label} has strides {list(leaf.stride())}: several elements "
                    "share memory, so nothing can be copied into it; pass it contiguous."
                )
        self.keys = tuple(kwargs)
        for key in REPLAY_KEYWORDS:
            if key in kwargs:
                raise ValueError(
                    f"{OP}: argument 'sample_kwargs' of {label} has {key!r}, which each replay takes by itself; leave "
                    "it out."
                )
        self.positional = len(args) if not kwargs and all(isinstance(a, torch.Tensor) for a in args) else None
        self._expect()

    @staticmethod
    def _name(path: tuple) -> str:
        where, *rest = path[1:]
        kind = f"argument {where.idx}" if path[0].idx == 0 else f"argument '{where.key}'"
        return kind + keystr(tuple(rest))

    def _expect(self) -> None:
        tensors = [self.leaves[i] for i in self.slots]
        self.expected = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]

    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.slots]

    def filled(self, tensors: list[torch.Tensor]) -> tuple[tuple, dict]:
        """(args, kwargs) with these tensors in the sample's places."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.slots, tensors, strict=True):
            leaves[i] = tensor
        return self.spec.unflatten(leaves)

    def forget_tensors(self) -> None:
        """Keeps the forms alone."""
        for i in self.slots:
            self.leaves[i] = None

    def match(self, args: tuple, kwargs: dict) -> list[torch.Tensor] | tuple[torch.Tensor, ...]:
        """The tensors of a call. TypeError for a wrong tree of arguments, ValueError for a wrong one of them."""
        if len(args) == self.positional and not kwargs:
            given = args
        else:
            given = self._flat(args, kwargs)
        try:
            grad = torch.is_grad_enabled()
            for t, (shape, stride, dtype, device, requires_grad) in zip(given, self.expected):
                if (
                    t.shape != shape
                    or t.dtype is not dtype
                    or t.stride() != stride
                    or t.device != device
                    or (t.requires_grad is not requires_grad and grad)
                ):
                    self._check_each(given)
                    break
        except AttributeError:
            self._check_each(given)
        return given

    def _flat(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        missing = [key for key in self.keys if key not in kwargs]
        unknown = [key for key in kwargs if key not in self.keys]
        if missing or unknown:
            raise TypeError(
                f"{self.label}: captured with the keywords {list(self.keys)}; of these {missing} are missing, and "
                f"{unknown} were not captured. Pass the same ones."
            )
        leaves, spec = tree_flatten((args, {key: kwargs[key] for key in self.keys}))
        if spec != self.spec:
            raise TypeError(
                f"{self.label}: captured with arguments of the form {self.spec}, called with {spec}; pass the same."
            )
        for i, (leaf, captured) in enumerate(zip(leaves, self.leaves, strict=True)):
            if i not in self.slots and (type(leaf) is not type(captured) or leaf != captured):
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {leaf!r}, but {captured!r} is part of the graph; pass that, or "
                    "capture again."
                )
        return [leaves[i] for i in self.slots]

    def _check_each(self, given: list | tuple) -> None:
        for i, t, (shape, stride, dtype, device, requires_grad) in zip(self.slots, given, self.expected, strict=True):
            wanted = f"{dtype} {list(shape)} with strides {list(stride)} on {device}"
            if not isinstance(t, torch.Tensor):
                raise ValueError(f"{self.label}: {self.names[i]} is {t!r}, captured was {wanted}; pass such a tensor.")
            alike = t.shape == shape and _strides(t.shape, t.stride()) == _strides(shape, stride)
            grad = t.requires_grad is requires_grad or not torch.is_grad_enabled()
            if not (alike and t.dtype is dtype and t.device == device and grad):
                wanted += ", requires_grad" if requires_grad else ""
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {_described(t)}, captured was {wanted}; pass such a tensor, or "
                    "capture again."
                )
