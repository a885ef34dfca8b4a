# Every operator that the extension registers is named inside a test that calls torch.library.opcheck.
import ast
from pathlib import Path

import torch

import transformer_engine.pytorch  # noqa: F401  registers the operators

TESTS = Path(__file__).parents[1] / "pytorch"
OVERLOADS = ("default", "main_grad")


def operators_checked(tree):
    """NAME of each ....NAME.default, NAME.OVERLOAD of others, inside functions that call opcheck."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef):
            continue
        attributes = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
        if any(node.attr == "opcheck" for node in attributes):
            yield from (
                node.value.attr if node.attr == "default" else f"{node.value.attr}.{node.attr}"
                for node in attributes
                if node.attr in OVERLOADS and isinstance(node.value, ast.Attribute)
            )


def test_every_operator_is_checked():
    registered = {
        name.removeprefix("te::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("te::")
    }
    checked = {name for path in TESTS.rglob("test_*.py") for name in operators_checked(ast.parse(path.read_text()))}
    assert len(registered) > 10
    assert not registered - checked, "give these an opcheck in the test of their room"
    assert not checked - registered
