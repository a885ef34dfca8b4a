"""Unknown keywords of a constructor or a context: the error suggests the right name, and a warning explains keywords
of older versions. Signatures stay unchanged, because clients inspect them."""

import difflib
import functools
import inspect
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import TypeVar

_Function = TypeVar("_Function", bound=Callable)

# Names that other libraries, and other versions of the API, use for an argument: the first one that exists is
# suggested.
_OTHER_WORDS = {
    "amax_reduction_group": ("fp8_group",),
    "batch_first": ("attn_input_format", "qkv_format"),
    "dropout": ("hidden_dropout", "attention_dropout"),
    "dtype": ("params_dtype",),
    "epsilon": ("eps", "layernorm_epsilon"),
    "fp8_group": ("amax_reduction_group",),
    "fp8_recipe": ("recipe",),
    "head_dim": ("kv_channels",),
    "input_size": ("in_features",),
    "layernorm_eps": ("eps",),
    "layernorm_epsilon": ("eps",),
    "num_heads": ("num_attention_heads",),
    "output_size": ("out_features",),
    "recipe": ("fp8_recipe",),
}
_ALIKE = 0.7  # difflib's ratio of two names that differ by a slip

# Keywords of older versions of the API, and what replaces them.
OF_ATTENTION = {
    "apply_query_key_layer_scaling": "scores are scaled in float32, where they need no second scale",
    "attention_softmax_in_fp32": "the softmax is always in float32",
}


def check_keywords(
    *beyond: str, renamed: Mapping[str, str] | None = None, retired: Mapping[str, str] | None = None
) -> Callable[[_Function], _Function]:
    """Makes a function, or an __init__, raise TypeError naming itself and the keyword that it does not have. beyond:
    keywords that its **kwargs accept. renamed: keywords of earlier versions of the API and their present names,
    accepted with a DeprecationWarning. retired: keywords without an effect, and why: a DeprecationWarning. A call costs
    half a microsecond more."""

    def mark(function: _Function) -> _Function:
        signature = inspect.signature(function)
        known, now, without = [*_names(signature), *beyond], renamed or {}, retired or {}

        @functools.wraps(function)
        def checked(*args, **kwargs):
            try:
                return function(*args, **kwargs)
            except TypeError:
                unknown = [name for name in kwargs if name not in known]
                if not unknown:
                    raise
                others = [name for name in unknown if name not in now and name not in without]
                if others:
                    raise _error(function, others[0], known) from None
            return function(*args, **_as_now(function, kwargs, now, without))

        checked.__signature__ = signature  # inspect.getfullargspec does not look through a wrapper
        return checked

    return mark


def _as_now(function: Callable, kwargs: dict, renamed: Mapping[str, str], retired: Mapping[str, str]) -> dict:
    """The keywords without those that have no effect, the others under their present names; warns of each."""
    taken = {}
    for name, value in kwargs.items():
        if name in retired:
            words = f"has no effect: {retired[name]}; leave it out."
        elif name in renamed:
            words = f"is deprecated, it is {renamed[name]!r} now."
            taken[renamed[name]] = value
        else:
            taken[name] = value
            continue
        warnings.warn(f"{_op_of(function)}: argument {name!r} {words}", DeprecationWarning, stacklevel=3)
    return taken


def _op_of(function: Callable) -> str:
    return function.__qualname__.removesuffix(".__init__")


def hides_unknown(function: _Function) -> _Function:
    """The same for a function that is called often: `**unknown` is removed from its signature, and the function raises
    unknown_keyword itself."""
    signature = inspect.signature(function)
    function.__signature__ = signature.replace(
        parameters=[p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    )
    return function


def unknown_keyword(function: Callable, unknown: Iterable[str]) -> TypeError:
    return _error(function, next(iter(unknown)), _names(inspect.signature(function)))


def _names(signature: inspect.Signature) -> list[str]:
    kinds = inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY
    return [name for name, p in signature.parameters.items() if p.kind in kinds and name != "self"]


def _error(function: Callable, name: str, known: list[str]) -> TypeError:
    op = _op_of(function)
    meant = [other for other in _OTHER_WORDS.get(name, ()) if other in known]
    meant = (meant or difflib.get_close_matches(name, known, 1, _ALIKE) or [None])[0]
    advice = f"it has {', '.join(known)}" if meant is None else f"did you mean {meant!r}?"
    return TypeError(f"{op}: no argument {name!r}; {advice}")
