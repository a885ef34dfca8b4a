# docs/reference/api: a page for each module and one for the functions, made of signatures, docstrings, api_meanings.py
# and what docs/reference/compatibility.md found of each argument. This file, run as a script, rewrites them;
# package/test_api_pages.py compares. Tries nothing itself.
import inspect
import re
import sys
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from operator import attrgetter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))  # tests/, which holds the package `pytorch`

import transformer_engine.pytorch as te
from pytorch.package.api_meanings import CALL, CONSTRUCTOR, OF
from transformer_engine.common import recipe

DOCS = Path(__file__).parents[3] / "docs/reference"
MODULES = (
    *("Linear", "LayerNorm", "RMSNorm", "LayerNormLinear", "LayerNormMLP", "GroupedLinear"),
    *("DotProductAttention", "MultiheadAttention", "TransformerLayer", "RotaryPositionEmbedding"),
)
FUNCTIONS = (
    *("autocast", "quantized_model_init", "checkpoint", "make_graphed_callables", "get_cpu_offload_context"),
    *("parallel_cross_entropy", "fused_linear_cross_entropy", "memory_plan", "explain", "tune", "doctor"),
    *("moe_permute", "moe_permute_with_probs", "moe_permute_and_pad_with_probs", "moe_unpermute"),
    *("moe_sort_chunks_by_index", "moe_sort_chunks_by_index_with_probs", "moe.moe_state_from_hf"),
    *("distributed.comm_usage", "distributed.CommTimeout"),
    *(
        f"router.fused_{name}"
        for name in ("topk_with_score_function", "compute_score_for_moe_aux_loss", "moe_aux_loss")
    ),
)
# page -> where from, and what it has, method by method
CLASSES = {
    "stash": (te, ("stash.PagedStash", "stash.Verdict", "stash.Plan")),
    "moe": (te, ("MoEMLP", "moe.GroupedMLP", "moe.TopKRouter")),
    "optimizers": (te, ("optimizers.FusedAdam", "optimizers.FusedSGD")),
    "recipes": (
        recipe,
        (
            "DelayedScaling",
            "Float8CurrentScaling",
            "Float8BlockScaling",
            "CustomRecipe",
            "Format",
            "QParams",
            "MMParams",
        ),
    ),
}
MADE = "This text is generated: `python tests/pytorch/package/api_pages.py` rewrites it.\n"


def text_of(documented):
    """A docstring as it stands: its formulas are no Markdown."""
    found = inspect.getdoc(documented)
    assert found, f"{documented} has no docstring"
    return f"```text\n{found}\n```"


def first_sentence(documented):
    return inspect.getdoc(documented).splitlines()[0].split(". ")[0].rstrip(".")


def refusals(document, name, word):
    """{argument: what is missing} of a module's constructor or call, as docs/reference/compatibility.md has it."""
    section = re.search(rf"^### {name}\n(.*?)(?=^### |\Z)", document, re.M | re.S)[1]
    part = re.search(rf"^{word}:\n\n(.*?)(?=^\w+:$|\Z)", section, re.M | re.S)
    lines = re.sub(r"\n  ", " ", part[1]).splitlines() if part else []
    found = {}
    for line in lines:
        what = re.match(r"- Raises \((.*)\): (.*)", line) or re.match(r"- (Works): (.*)", line)
        if what:
            found |= dict.fromkeys(re.findall(r"`(\w+)`", what[2]), "" if what[1] == "Works" else what[1])
    return found


def shown(parameter):
    if parameter.kind is parameter.VAR_KEYWORD:
        return "`**kwargs`", ""
    value = parameter.default
    if value is parameter.empty:
        return f"`{parameter.name}`", "required"
    if isinstance(value, Enum):
        return f"`{parameter.name}`", f"`{type(value).__name__}.{value.name}`"
    if is_dataclass(value):  # what is not the class's own default
        own = type(value)()
        given = [
            f"{f.name}={getattr(value, f.name)!r}"
            for f in fields(value)
            if getattr(value, f.name) != getattr(own, f.name)
        ]
        return f"`{parameter.name}`", f"`{type(value).__name__}({', '.join(given)})`"
    return f"`{parameter.name}`", f"`{value!r}`"


def table(name, function, meanings, known):
    lines = ["| argument | default | meaning | here |", "|---|---|---|---|"]
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name == "self":
            continue
        meaning = OF.get((name, parameter.name), meanings.get(parameter.name))
        assert meaning, f"{name}: no meaning of '{parameter.name}' is given: give it a line in api_meanings.py"
        missing = known.get(parameter.name)
        here = "works" if not missing else f"raises ({missing})".replace("|", "\\|")
        lines.append("| " + " | ".join((*shown(parameter), meaning.replace("|", "\\|"), here)) + " |")
    return "\n".join(lines)


def module_page(name):
    module, document = getattr(te, name), (DOCS / "compatibility.md").read_text()
    return "\n".join(
        [
            f"# transformer_engine.pytorch.{name}\n",
            MADE,
            text_of(module) + "\n",
            "## Constructor\n",
            table(name, module.__init__, CONSTRUCTOR, refusals(document, name, "Constructor")) + "\n",
            "## Call\n",
            *([text_of(module.forward) + "\n"] if inspect.getdoc(module.forward) else []),
            table(name, module.forward, CALL, refusals(document, name, "Call")) + "\n",
        ]
    )


def functions_page():
    parts = ["# Functions of transformer_engine.pytorch\n", MADE]
    for name in FUNCTIONS:
        function = attrgetter(name)(te)
        parts += [f"## {name}\n", "| argument | default |", "|---|---|"]
        given = [p for p in inspect.signature(function).parameters.values() if not p.name.startswith("_")]
        parts += ["| " + " | ".join(shown(p)) + " |" for p in given]
        parts += ["", text_of(function) + "\n"]
    return "\n".join(parts)


def arguments(function, defaults=None):
    """defaults: those that the signature does not have."""
    given = [p for p in inspect.signature(function).parameters.values() if p.name != "self"]
    given = [p.replace(default=(defaults or {}).get(p.name, p.default)) for p in given]
    rows = ["| " + " | ".join(shown(p)) + " |" for p in given]
    return ["| argument | default |", "|---|---|", *rows, ""] if rows else []


def constructor(found):
    if issubclass(found, Enum):
        return (
            ["| value | largest forward | largest of gradients |", "|---|---|---|"]
            + [f"| `{member.name}` | {member.value.max_fwd:g} | {member.value.max_bwd:g} |" for member in found]
            + [""]
        )
    made = (
        {f.name: f.default_factory() for f in fields(found) if f.default_factory is not MISSING}
        if is_dataclass(found)
        else {}
    )
    return arguments(found.__init__, made)


def classes_page(page):
    source, names = CLASSES[page]
    parts = [f"# {source.__name__}.{page}\n" if source is te else f"# {source.__name__}\n", MADE]
    for name in names:
        found = attrgetter(name)(source)
        parts += [f"## {name}\n", *constructor(found), text_of(found) + "\n"]
        folder = found.__module__.rpartition(".")[0]
        own = [base for base in reversed(found.__mro__) if base.__module__.rpartition(".")[0] == folder]
        for method, function in {name: f for base in own for name, f in vars(base).items()}.items():
            if inspect.isfunction(function) and not method.startswith("_") and function.__doc__:
                parts += [f"### {name}.{method}\n", *arguments(function), text_of(function) + "\n"]
    return "\n".join(parts)


def pages():
    made = {f"{name}.md": module_page(name) for name in MODULES}
    made["functions.md"] = functions_page()
    made |= {f"{page}.md": classes_page(page) for page in CLASSES}
    index = [f"- [{name}]({name}.md): `{first_sentence(getattr(te, name))}`" for name in MODULES]
    index.append("- [functions](functions.md): " + ", ".join(f"`{name}`" for name in FUNCTIONS))
    index += [
        f"- [{page}]({page}.md): " + ", ".join(f"`{name}`" for name in names) for page, (_, names) in CLASSES.items()
    ]
    heads = "The names that work, raise an error or are missing: [compatibility](../compatibility.md).\n"
    made["README.md"] = "\n".join(["# API\n", MADE, heads, *index, ""])
    return made


if __name__ == "__main__":
    (DOCS / "api").mkdir(exist_ok=True)
    for page, text in pages().items():
        (DOCS / "api" / page).write_text(text)
    print(f"wrote {len(pages())} pages in {DOCS / 'api'}")
