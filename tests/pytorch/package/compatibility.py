# docs/reference/compatibility.md: what becomes of every name of the API (api_names.py). Each name is imported, each one
# that does not refuse is called (api_calls.py); the parameters of modules are tried one value at a time, forward and
# backward (api_probes.py). `python tests/pytorch/package/compatibility.py` rewrites the document, which
# package/test_compatibility.py compares.
import enum
import importlib
import inspect
import re
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "helpers"))
sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, which holds the package `pytorch`

from api_names import BASE_METHODS, MODULES, SUBMODULES, TE, TOP_LEVEL

from pytorch.package.api_calls import CALLS, REFUSED
from pytorch.package.api_probes import CALL, CALL_OF, INIT, INIT_OF, SAMPLES

DOCUMENT = Path(__file__).parents[3] / "docs/reference/compatibility.md"
WORKS, NOT_THERE = "works", "not there"

HEAD = """# Compatibility

The state of every name of the Transformer Engine {version} API for PyTorch. This text is generated:
`tests/pytorch/package/compatibility.py` imports each name and tries each parameter, forward and backward on the CPU. A
test fails if the text is outdated, and `python tests/pytorch/package/compatibility.py` rewrites it.

*Works*: it behaves as the API documents, except for arguments that are named in brackets after it. *Raises*: the name
exists, and using it raises a NotImplementedError that names it and what is missing (in brackets; a value in quotes:
that value raises, others work). *Not there*: importing it raises an ImportError, which clients guard against with their
own implementation; what is missing is in brackets. A parameter that is accepted because it changes no result here (a
hint to a kernel, a label) works.
"""


def reason(error):
    """The missing capability that an error names: '... but FP8 is not available in this version; ...' -> FP8."""
    found = re.search(r"(?:.*, but |.*?: )(.+?),?(?: which)? (?:is|are) not available in this version", str(error))
    assert found, f"a refusal that does not name the missing capability: {error}"
    return re.sub(r"^argument '\w+' is ", "", found[1])


def parameters_of(text):
    signature = inspect.signature(eval(f"lambda {' '.join(text.split())}: None"))
    return {p.name: p.default for p in signature.parameters.values()}


class Partly(tuple):
    """Works, but for (argument, what is missing) pairs."""

    def text(self, name):
        refused = "; ".join(f"`{argument}` raises, {missing}" for argument, missing in self)
        return f"`{name}` ({refused})" if self else f"`{name}`"


# ---- trying ----


def outcome(call, name):
    """'works', or what is missing. Any other exception is a defect, of the library or of the probe."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            call()
    except NotImplementedError as error:
        assert name in str(error), f"{name}: the refusal does not name it: {error}"
        return reason(error)
    return WORKS


def absent(target):
    return getattr(target, "absent_capability", None) is not None


def import_outcome(module, name):
    """Of a name that is imported from a module."""
    try:
        target = getattr(importlib.import_module(module), name)
    except ImportError:
        return NOT_THERE
    except AttributeError as error:
        return f"{NOT_THERE}: {reason(error)}"
    if absent(target):
        found = outcome(target, name)
        assert found != WORKS, f"{module}.{name} is marked absent, but does not raise"
        return found
    if name in SAMPLES:
        return outcome(lambda: run(name), name)
    if (inspect.ismodule(target) and name not in CALLS) or not callable(target) or is_enum(target):
        return WORKS
    assert name in CALLS, f"no test calls {module}.{name}: give it a line in api_calls.CALLS"
    found = outcome(CALLS[name], name)
    if found == WORKS and name in REFUSED:
        tried = {argument: outcome(call, "") for argument, call in REFUSED[name].items()}
        return Partly((argument, missing) for argument, missing in tried.items() if missing != WORKS)
    return found


def is_enum(target):
    return isinstance(target, enum.EnumMeta)


def run(cls, init=None, call=None, positional=None, inputs=None):
    """One small step of a module: built, called, and differentiated if an output requires a gradient."""
    torch.manual_seed(0)
    arguments, options, sample = SAMPLES[cls]
    module = getattr(importlib.import_module(TE), cls)(
        *(arguments if positional is None else positional), **{**options, **(init or {})}
    )
    for parameter in module.parameters():
        parameter.main_grad = torch.zeros(parameter.shape)
    dtypes = {p.dtype for p in module.parameters()} or {torch.float32}
    given = [
        t.detach().to(*dtypes).requires_grad_() if isinstance(t, torch.Tensor) else t for t in (inputs or sample)()
    ]
    outputs = module(*given, **(call or {}))
    outputs = [t for t in (outputs if isinstance(outputs, tuple) else (outputs,)) if isinstance(t, torch.Tensor)]
    assert outputs and all(t.isfinite().all() for t in outputs)
    differentiable = [t for t in outputs if t.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.ones_like(t) for t in differentiable])
    for part in module.modules():
        if getattr(part, "need_backward_dw", bool)():
            part.backward_dw()
    for parameter in module.parameters():
        assert parameter.grad is None or parameter.grad.isfinite().all()


def parameter_outcome(cls, name, probes):
    found = {}
    for probe in probes:
        kind = outcome(lambda p=probe: run(cls, p.init, p.call, p.positional, p.inputs), cls_or_part(cls))
        found[str(probe.value)] = kind
    kinds = set(found.values())
    if kinds <= {WORKS}:
        return WORKS
    if len(kinds) == 1:
        return kinds.pop()
    return ", ".join(f"'{value}'" for value, kind in found.items() if kind != WORKS)


def cls_or_part(cls):
    """A refusal may come from the part of a module that would do the work; it always names an argument."""
    return "argument '" if cls in ("MultiheadAttention", "TransformerLayer") else cls


def module_outcomes(cls, which):
    """{parameter: outcome} of a module's constructor (0) or forward (1)."""
    module = getattr(importlib.import_module(TE), cls, None)
    wanted = parameters_of(MODULES[cls][which])
    if module is None:
        return dict.fromkeys(wanted, NOT_THERE)
    signature = inspect.signature((module.__init__, module.forward)[which])
    there = {p.name: p for p in signature.parameters.values()}
    outcomes = {}
    for name, default in wanted.items():
        if name not in there:
            outcomes[name] = NOT_THERE
            continue
        ours = there[name].default
        assert ours == default or (name, ours) == ("device", None), f"{cls}: '{name}' has the default {ours!r}"
        if default is inspect.Parameter.empty or name in ("query_layer", "key_layer", "value_layer"):
            outcomes[name] = WORKS  # every probe passes it
            continue
        outcomes[name] = parameter_outcome(cls, name, probes_of(cls, name, which))
    return outcomes


def probes_of(cls, name, which):
    if which == 0:
        probes = INIT_OF.get((cls, name), INIT.get(name))
    else:
        probes = CALL_OF.get(cls, {}).get(name, CALL.get(name))
    assert probes, f"{cls}: nothing tries '{name}': give it a line in api_probes"
    return probes


# ---- writing ----


def lines_of(outcomes):
    """Bullets: names that work, names that raise (by the missing capability), missing names."""
    groups = {}
    for name, found in outcomes.items():
        partly = isinstance(found, Partly)
        groups.setdefault(WORKS if partly else found, []).append(found.text(name) if partly else f"`{name}`")
    text = []
    for found in sorted(groups, key=lambda f: (f != WORKS, f.startswith(NOT_THERE), f)):
        label = {WORKS: "Works", NOT_THERE: "Not there"}.get(found, f"Raises ({found})")
        if found.startswith(f"{NOT_THERE}: "):
            label = f"Not there ({found.removeprefix(f'{NOT_THERE}: ')})"
        text.append(wrapped(f"- {label}: {', '.join(groups[found])}"))
    return text


def wrapped(line, width=120):
    rows, row = [], ""
    for word in line.split(" "):
        if len(row) + len(word) + 1 > width:
            rows.append(row)
            row = "  " + word
        else:
            row = f"{row} {word}" if row else word
    return "\n".join([*rows, row])


def document():
    import transformer_engine

    parts = [HEAD.format(version=transformer_engine.__version__), f"## Names of `{TE}`\n"]
    for group, names in TOP_LEVEL.items():
        parts += [f"{group}:\n", *lines_of({name: import_outcome(TE, name) for name in names.split()}), ""]
    parts += ["## Names of its modules\n"]
    for module, names in SUBMODULES.items():
        parts += [f"`{module}`:\n", *lines_of({name: import_outcome(module, name) for name in names.split()}), ""]
    parts += ["## Methods of every module with parameters\n"]
    base = importlib.import_module(f"{TE}.module.base").TransformerEngineBaseModule
    parts += [*lines_of({n: WORKS if hasattr(base, n) else NOT_THERE for n in BASE_METHODS.split()}), ""]
    parts += [
        "## Parameters of modules\n",
        "`device` is CUDA where there is one and else the CPU, unless it is given.\n",
    ]
    for cls in MODULES:
        target = getattr(importlib.import_module(TE), cls, None)
        if absent(target):
            check_absent(cls, target)
            parts += [f"### {cls}\n", "All there, with the defaults of the API; constructing it raises.\n"]
            continue
        for which, word in enumerate(("Constructor", "Call")):
            parts += [f"### {cls}\n"] if which == 0 else []
            parts += [f"{word}:\n", *lines_of(module_outcomes(cls, which)), ""]
    return "\n".join(parts).rstrip() + "\n"


def check_absent(cls, target):
    for function, text in zip(
        (target.__init__, target.forward if MODULES[cls][1] else None), MODULES[cls], strict=True
    ):
        if function is None:
            continue
        found = {p.name: p.default for p in inspect.signature(function).parameters.values() if p.name != "self"}
        wanted = parameters_of(text) | ({"device": None} if "device" in found else {})
        assert found == wanted, f"{cls}: {found}, wanted {wanted}"


if __name__ == "__main__":
    DOCUMENT.write_text(document())
    print(f"wrote {DOCUMENT}")
