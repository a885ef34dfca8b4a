"""The signature of a captured callable: the structure of its sample arguments, and the check of a call against it.

- Signature.match checks the arguments of a replay; it copies and changes nothing.
"""

from collections.abc import Mapping

import torch

from transformer_engine.pytorch._internal.torch_private import pytree
from transformer_engine.pytorch.graph.describe import OP, PLAIN_TENSORS, describe_tensor, short_repr
from transformer_engine.pytorch.graph.memory.buffers import has_internal_overlap
from transformer_engine.pytorch.graph.replay.constants import comparable_copy, equal_constants

REPLAY_KEYWORDS = ("is_first_microbatch", "cuda_graph_stream", "cuda_graph_event")


def _strides(t_shape: torch.Size, t_stride: tuple[int, ...]) -> tuple[int, ...]:
    """The strides that affect where elements lie: not those of dimensions of size one."""
    return tuple(step for size, step in zip(t_shape, t_stride) if size > 1)


def _no_memory(t: torch.Tensor) -> str | None:
    """Why the values of a tensor cannot be copied between buffers, and the fix; None if they can."""
    if t.is_nested or t.layout is not torch.strided:
        return "is not dense; pass a dense tensor (to_dense(), to_padded_tensor(), its values())"
    if t.is_meta:
        return "has no values; create it on the device of the callable"
    if t.is_conj() or t.is_neg():
        return "is a conjugated or negated view; pass its resolve_conj().resolve_neg()"
    try:
        t.data_ptr()
    except (RuntimeError, ValueError):
        name = type(t).__name__
        return f"is a {name}, which holds its values in other tensors; pass those, and build it inside of the callable"
    return None


def _is_constant(value: object) -> bool:
    """Whether a value is a leaf other than a tensor, or a tuple of such values."""
    if type(value) is tuple:
        return all(map(_is_constant, value))
    return not isinstance(value, torch.Tensor) and pytree.tree_is_leaf(value)


class _OneLeaf:
    """Makes a keyword's tuple of constants one leaf, so that a call does not flatten it."""

    def __init__(self, value: tuple) -> None:
        self.value = value


class Signature:
    """args and kwargs of one sample: the places and layouts of tensors, and the constants beside them."""

    def __init__(self, label: str, args: tuple, kwargs: Mapping[str, object]) -> None:
        self.label = label
        self._check_keywords(kwargs)
        keywords = {key: _OneLeaf(v) if type(v) is tuple and _is_constant(v) else v for key, v in kwargs.items()}
        paths, self.spec = pytree.tree_flatten_with_path((tuple(args), keywords))
        paths = [(path, leaf.value if isinstance(leaf, _OneLeaf) else leaf) for path, leaf in paths]
        self.leaves = [leaf for _, leaf in paths]
        self.names = [self._name(path) for path, _ in paths]
        self.tensor_indices = [i for i, leaf in enumerate(self.leaves) if isinstance(leaf, torch.Tensor)]
        self.constants: list[tuple[int, object]] = []
        for i, (path, leaf) in enumerate(paths):
            if isinstance(leaf, torch.Tensor):
                self._check_sample(self.names[i], leaf)
            elif path[0].idx == 0:
                raise ValueError(
                    f"{OP}: argument 'sample_args' of {label} has {short_repr(leaf)} at {self.names[i]}, wanted only "
                    "tensors; pass other values by name, in 'sample_kwargs'."
                )
            else:
                self.constants.append((i, comparable_copy(leaf, f"{self.names[i]} of {label}")))
        self.keys, self.key_set = tuple(kwargs), frozenset(kwargs)
        self.positional = len(args) if not kwargs and all(isinstance(a, torch.Tensor) for a in args) else None
        # Without containers the arguments are the leaves, and no tree has to be flattened.
        direct = len(paths) == len(args) + len(kwargs) and all(len(path) == 2 for path, _ in paths)
        self.flat = len(args) if direct else None
        tensors = self.tensors()
        self.expected = [(t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in tensors]
        # A conjugated or negated view may differ from one of these in nothing else.
        self.lazy = any(t.is_complex() or not t.is_contiguous() for t in tensors)

    def _check_keywords(self, kwargs: Mapping[str, object]) -> None:
        for key in kwargs:
            if not isinstance(key, str):
                raise ValueError(
                    f"{OP}: argument 'sample_kwargs' of {self.label} has the key {short_repr(key)}, wanted names of "
                    "its arguments."
                )
            if key in REPLAY_KEYWORDS:
                raise ValueError(
                    f"{OP}: argument 'sample_kwargs' of {self.label} has {key!r}, which is a keyword of each replay; "
                    "leave it out."
                )

    def _check_sample(self, name: str, t: torch.Tensor) -> None:
        why = _no_memory(t)
        if why is None and t.is_inference() and not torch.is_inference_mode_enabled():
            why = "was made in inference mode, so it cannot be written outside of that mode; pass its clone()"
        if why is None and has_internal_overlap(t):
            why = f"has strides {list(t.stride())}: several elements share memory; pass it contiguous"
        if why is not None:
            raise ValueError(f"{OP}: sample {name} of {self.label} {why}.")

    @staticmethod
    def _name(path: tuple) -> str:
        where, *rest = path[1:]
        kind = f"argument {where.idx}" if path[0].idx == 0 else f"argument '{where.key}'"
        return kind + pytree.keystr(tuple(rest))

    def tensors(self) -> list[torch.Tensor]:
        return [self.leaves[i] for i in self.tensor_indices]

    def unflatten(self, tensors: list[torch.Tensor]) -> tuple[tuple, dict]:
        """(args, kwargs) with these tensors in place of those of the sample."""
        leaves = list(self.leaves)
        for i, tensor in zip(self.tensor_indices, tensors, strict=True):
            leaves[i] = tensor
        return self.spec.unflatten(leaves)

    def forget_tensors(self) -> None:
        """Drops the tensors; their layouts stay."""
        for i in self.tensor_indices:
            self.leaves[i] = None

    def match(self, args: tuple, kwargs: dict) -> list[torch.Tensor] | tuple[torch.Tensor, ...]:
        """The tensors of a call. TypeError for a wrong structure of arguments, ValueError for a wrong argument."""
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
                    or t.__class__ not in PLAIN_TENSORS
                ):
                    self._check_each(given)
                    break
            if self.lazy and any(t.is_conj() or t.is_neg() for t in given):
                self._check_each(given)
        except (AttributeError, RuntimeError):
            self._check_each(given)
        return given

    def _flat(self, args: tuple, kwargs: dict) -> list[torch.Tensor]:
        if kwargs.keys() != self.key_set:  # a keyword that was not captured may be None
            kwargs = {key: value for key, value in kwargs.items() if value is not None or key in self.key_set}
        if kwargs.keys() != self.key_set:
            missing = [key for key in self.keys if key not in kwargs]
            unknown = [key for key in kwargs if key not in self.keys]
            raise TypeError(
                f"{self.label}: captured with the keywords {list(self.keys)}; of these {missing} are missing, and "
                f"{unknown} were not captured. Pass the same keywords, and others only as None."
            )
        if len(args) == self.flat:
            leaves = [*args, *[kwargs[key] for key in self.keys]]
        else:
            try:
                leaves = self.spec.flatten_up_to((args, kwargs))  # a dict matches by keys, in any order
            except ValueError as error:
                raise TypeError(
                    f"{self.label}: captured with the arguments {self._arguments()}; called with {short_repr(args)} "
                    f"and {short_repr(kwargs)}: {error} Pass the same structure."
                ) from error
        for i, own in self.constants:
            if not equal_constants(leaves[i], own):
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {short_repr(leaves[i])}, but {short_repr(own)} is part "
                    "of the graph; pass that, or capture again."
                )
        return [leaves[i] for i in self.tensor_indices]

    def _arguments(self) -> str:
        listed = ", ".join(self.names[:16]) + (", ..." if len(self.names) > 16 else "")
        return listed or "no argument"

    def _check_each(self, given: list | tuple) -> None:
        for i, t, (shape, stride, dtype, device, requires_grad) in zip(
            self.tensor_indices, given, self.expected, strict=True
        ):
            wanted = f"{dtype} {list(shape)} with strides {list(stride)} on {device}"
            wanted += ", requires_grad" if requires_grad else ""
            if not isinstance(t, torch.Tensor):
                raise ValueError(
                    f"{self.label}: {self.names[i]} is {short_repr(t)}, captured was {wanted}; pass such a tensor."
                )
            if t.layout is torch.strided and not t.is_nested:
                alike = t.shape == shape and _strides(t.shape, t.stride()) == _strides(shape, stride)
                grad = t.requires_grad is requires_grad or not torch.is_grad_enabled()
                if not (alike and t.dtype is dtype and t.device == device and grad):
                    raise ValueError(
                        f"{self.label}: {self.names[i]} is {describe_tensor(t)}, captured was {wanted}; pass such a "
                        "tensor, or capture again."
                    )
            why = _no_memory(t)
            if why is not None:
                raise ValueError(f"{self.label}: {self.names[i]} {why}; captured was {wanted}.")
