# Every attribute that the package reads is defined somewhere: in the package, in what the extension binds, or in a
# module that is loaded beside it. A binding that is renamed while a caller keeps its earlier name turns this red, also
# where the caller runs on devices that the machine does not have.
import ast
import contextlib
import importlib
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "transformer_engine"
STRING = re.compile(r'"(?:te::)?(\w+)')  # in csrc: names of classes, methods and operators are among them
# Of instances of torch's classes, and of figures of matplotlib, which may be absent.
INSTANCES = {
    *("_flash_attention_forward", "_load_state_dict_pre_hooks", "_local_tensor", "_per_optimizer_states", "_schema"),
    *("_unsafe_view", "one_shot_all_reduce", "two_shot_all_reduce_", "pack_hook", "register_flop_formula"),
    *("axhline", "savefig", "set_title", "subplots"),
}


def trees():
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def defined(tree):
    """Names that a file gives to something; strings count, since fields and modules are named by them too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg | ast.keyword):
            yield node.arg
        elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.id if isinstance(node, ast.Name) else node.attr
        elif isinstance(node, ast.alias):
            yield (node.asname or node.name).split(".")[-1]
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield from node.value.split()


def load(tree):
    """The imports of a file, also those inside of functions."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            with contextlib.suppress(ImportError):
                importlib.import_module(name)


def loaded():
    """The attributes of all modules that are loaded but the package's own, and of their classes."""
    for name, module in list(sys.modules.items()):
        if name.startswith("transformer_engine") or module is None:
            continue
        for key, value in list(getattr(module, "__dict__", {}).items()):
            yield key
            if isinstance(value, type):
                yield from dir(value)


def bound():
    return {name for path in PACKAGE.rglob("*.cpp") for name in STRING.findall(path.read_text())}


def undefined(files, known):
    return [
        f"{path.relative_to(ROOT)}:{node.lineno}: {node.attr}"
        for path, tree in files.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load) and node.attr not in known
    ]


def test_every_attribute_is_defined():
    files = trees()
    for tree in files.values():
        load(tree)
    known = INSTANCES | {name for tree in files.values() for name in defined(tree)} | set(loaded()) | bound()
    assert not (found := undefined(files, known)), "\n".join(found)
    later = {PACKAGE / "later.py": ast.parse("channel.renamed_since()")}
    assert undefined(later, known) == ["transformer_engine/later.py:1: renamed_since"]
