"""Where a replay checks its arguments: the form of what a callable was captured with (Signature), and the check of each
call against it (Signature.match). Copies nothing and changes nothing."""

from collections.abc import Mapping

import torch
from torch.nn import Parameter

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, form_of, shown
from transformer_engine.pytorch.graph.memory.buffers import overlapping
from transformer_engine.pytorch.graph.replay.constants import kept, same

REPLAY_KEYWORDS = ("is_first_microbatch", "cuda_graph_stream", "cuda_graph_event")
_PLAIN = (torch.Tensor, Parameter)  # others may have no memory


def _strides(t_shape: torch.Size, t_stride: tuple[int, ...]) -> tuple[int, ...]:
    """Those that say where elements are: a dimension of one has none."""
    return tuple(step for size, step in zip(t_shape, t_stride) if size > 1)


def _no_memory(t: torch.Tensor) -> str | None:
    """Why a tensor's values cannot be copied from one memory to another, and what to do; None where they can."""
    if t.is_nested or t.layout is not torch.strided:
        return "has no one memory with strides; pass it dense (to_dense(), to_padded_tensor(), its values())"
    if t.is_meta:
        return "has no values; make it on the device that the callable runs on"
    if t.is_conj() or t.is_neg():
        return "is conjugated or negated when it is read, not in memory; pass resolve_conj().resolve_neg() of it"
    try:
        t.data_ptr()
    except (RuntimeError, ValueError):
        return f"is a {type(t).__name__}, whose values lie in other tensors; pass those, and make it of them inside"
    return None


def _constant(value: object) -> bool:
    """A tuple of what are no tensors, or one of these."""
    if type(value) is tuple:
        return all(map(_constant, value))
    return not isinstance(value, torch.Tensor) and pytree.tree_is_leaf(value)


class _Whole:
    """Keeps a keyword's tuple of constants in one piece: a call needs no walk over a tree for it."""

    def __init__(self, value: tuple) -> None:
        self.value = value


class Signature:
    """args and kwargs of one sample: where tensors stand, of what form, and the constants beside them."""

    def __init__(self, label: str, args: tuple, kwargs: Mapping[str, object]) -> None:
        self.label = label
        self._check_keywords(kwargs)
        whole = {key: _Whole(v) if type(v) is tuple and _constant(v) else v for key, v in kwargs.items()}
        paths, self.spec = pytree.tree_flatten_with_path((tuple(args), whole))
        paths = [(path, leaf.value if isinstance(leaf, _Whole) else leaf) for path, leaf in paths]
        self.leaves = [leaf for _, leaf in paths]
        self.names = [self._name(path) for path, _ in paths]
        self.slots = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.constants: list[tuple[int, object]] = []
        for i, (path, leaf) in enumerate(paths):
            if isinstance(leaf, torch.Tensor):
                self._check_sample(self.names[i], leaf)
            elif path[0].idx == 0:
                raise ValueError(
                    f"{OP}: argument 'sample_args' of {label} has {shown(leaf)} at {self.names[i]}, wanted tensors "
                    "alone; pass what is none by name, in 'sample_kwargs'."
                )
            else:
                self.constants.append((i, kept(leaf, f"{self.names[i]} of {label}")))
        self.keys, self.key_set = tuple(kwargs), frozenset(kwargs)
        self.positional = len(args) if not kwargs and all(isinstance(a, torch.Tensor) for a in args) else None
        # Without containers no tree has to be walked: what is passed are the leaves.
        direct = len(paths) == len(args) + len(kwargs) and all(len(path) == 2 for path, _ in paths)
        self.flat = len(args) if direct else None
        tensors = self.tensors()
        self.expected = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]
        # A view conjugated or negated when it is read can have the form of one of these, and differ in nothing else.
        self.lazy = any(t.is_complex() or not t.is_contiguous() for t in tensors)

    def _check_keywords(self, kwargs: Mapping[str, object]) -> None:
        for key in kwargs:
            if not isinstance(key, str):
                raise ValueError(
                    f"{OP}: argument 'sample_kwargs' of {self.label} has the key {shown(key)}, wanted names of its "
                    "arguments."
                )
            if key in REPLAY_KEYWORDS:
                raise ValueError(
                    f"{OP}: argument 'sample_kwargs' of {self.label} has {key!r}, which each replay takes by itself; "
                    "leave it out."
                )

    def _check_sample(self, name: str, t: torch.Tensor) -> None:
        why = _no_memory(t)
        if why is None and t.is_inference() and not torch.is_inference_mode_enabled():
            why = "was made in inference mode, so that nothing can be copied into it out of that; pass clone() of it"
        if why is None and overlapping(t):
            why = f"has strides {list(t.stride())}: several elements share memory; pass it contiguous"
        if why is not None:
            raise ValueError(f"{OP}: sample {name} of {self.label} {why}.")

    @staticmethod
    def _name(path: tuple) -> str:
        where, *rest = path[1:]
        kind = f"argument {where.idx}" if path[0].idx == 0 else f"argument '{where.key}'"
        return kind + pytree.keystr(tuple(rest))

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
                    or t.__class__ not in _PLAIN
                ):
                    self._check_each(given)
                    break
            if self.lazy and any(t.is_conj() or t.is_neg() for t in given):
                self._check_each(given)
        except (AttributeError, RuntimeError):
            self._check_each(given)
        return given

    def _flat(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        if kwargs.keys() != self.key_set:  # None says nothing, for a keyword that was not captured
            kwargs = {key: value for key, value in kwargs.items() if value is not None or key in self.key_set}
        if kwargs.keys() != self.key_set:
            missing = [key for key in self.keys if key not in kwargs]
            unknown = [key for key in kwargs if key not in self.keys]
            raise TypeError(
                f"{self.label}: captured with the keywords {list(self.keys)}; of these {missing} are missing, and "
                f"{unknown} were not captured. Pass the same ones, others as None alone."
            )
        if len(args) == self.flat:
            leaves = [*args, *[kwargs[key] for key in self.keys]]
        else:
            try:
                leaves = self.spec.flatten_up_to((args, kwargs))  # a dict by its keys, in whichever order
            except ValueError as error:
                raise TypeError(
                    f"{self.label}: captured with arguments of the form {self._arguments()}; called with {shown(args)} "
                    f"and {shown(kwargs)}: {error} Pass the same."
                ) from error
        for i, own in self.constants:
            if not same(leaves[i], own):
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {shown(leaves[i])}, but {shown(own)} is part of the graph; "
                    "pass that, or capture again."
                )
        return [leaves[i] for i in self.slots]

    def _arguments(self) -> str:
        listed = ", ".join(self.names[:16]) + (", ..." if len(self.names) > 16 else "")
        return listed or "no argument"

    def _check_each(self, given: list | tuple) -> None:
        for i, t, (shape, stride, dtype, device, requires_grad) in zip(self.slots, given, self.expected, strict=True):
            wanted = f"{dtype} {list(shape)} with strides {list(stride)} on {device}"
            wanted += ", requires_grad" if requires_grad else ""
            if not isinstance(t, torch.Tensor):
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {shown(t)}, captured was {wanted}; pass such a tensor."
                )
            if t.layout is torch.strided and not t.is_nested:
                alike = t.shape == shape and _strides(t.shape, t.stride()) == _strides(shape, stride)
                grad = t.requires_grad is requires_grad or not torch.is_grad_enabled()
                if not (alike and t.dtype is dtype and t.device == device and grad):
                    raise ValueError(
                        f"{self.label}: {self.names[i]} is {form_of(t)}, captured was {wanted}; pass such a tensor, "
                        "or capture again."
                    )
            why = _no_memory(t)
            if why is not None:
                raise ValueError(f"{self.label}: {self.names[i]} {why}; captured was {wanted}.")
