# The structure of the source, measured from its text: imports and lines that are written twice. test_house.py
# holds the figures; `python tests/policy/house.py` prints the tables of layers and of the walk (walks.py) for
# docs/develop/architecture.md, or with --figures the rest.
import ast
import collections
import re
import sys
from pathlib import Path

import walks

REPO = Path(__file__).parents[2]
ARCHITECTURE = REPO / "docs/develop/architecture.md"
PACKAGE = "transformer_engine.pytorch"
SOURCE = REPO / "transformer_engine"

# The layers of the Python package, the lowest first, and their folders and top-level files. A folder imports from lower
# layers, and within its own layer in one direction.
LAYERS = {
    "base": "common _internal functional constants flops jit torch_version debug utils verdict",
    "data": "tensor saved distributed",
    "numerics": "quantization",
    "modules": "module attention moe ops optimizers cross_entropy cpp_extensions transformer newton_schulz permutation "
    "router export",
    "systems": "graph stash cpu_offload data_parallel probe",
    "faces": "compat pytorch doctor bench transformer_engine",
}
LAYER = {folder: number for number, folders in enumerate(LAYERS.values()) for folder in folders.split()}


def modules():
    """{dotted name: path} of every Python file of the package."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        parts = path.relative_to(REPO).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def folder_of(name):
    """The folder of transformer_engine/pytorch, or the top-level file, that a module belongs to."""
    if name.startswith(PACKAGE + "."):
        return name.removeprefix(PACKAGE + ".").split(".")[0]
    return name.split(".")[-1 if name in (PACKAGE, "transformer_engine") else 1]


def arrows(known):
    """{(importer, imported)} between the package's modules, wherever the import stands: in a function or under
    TYPE_CHECKING as well. `from package import name` is an arrow to a module of that name, else to the package, unless
    that is the root, whose names are its modules and the extension."""
    found = set()
    for name, path in known.items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                targets = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom) and not node.level:
                given = [f"{node.module}.{alias.name}" for alias in node.names]
                targets = [t if t in known or node.module == PACKAGE else node.module for t in given]
            else:
                continue
            found |= {(name, target) for target in targets if target in known and target != name}
    return found


def imports_in_functions(known):
    """Places where a module of the package is imported inside of a function."""
    found = []
    for path in known.values():
        for function in ast.walk(ast.parse(path.read_text())):
            if isinstance(function, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for node in ast.walk(function):
                    names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
                    names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
                    if any(name.startswith("transformer_engine") for name in names):
                        found.append(f"{path.relative_to(REPO)}:{node.lineno}")
    return sorted(set(found))


def circles(edges):
    """Sets of names that reach each other."""
    onward = collections.defaultdict(set)
    for start, end in edges:
        onward[start].add(end)

    def reached(start):
        seen, todo = set(), [start]
        while todo:
            for following in onward[todo.pop()] - seen:
                seen.add(following)
                todo.append(following)
        return seen

    reach = {name: reached(name) for name in list(onward)}
    return sorted({tuple(sorted({a, *(b for b in reach[a] if a in reach.get(b, ()))})) for a in reach if a in reach[a]})


def upward(edges):
    """Imports from a higher layer."""
    return sorted((a, b) for a, b in edges if LAYER[folder_of(a)] < LAYER[folder_of(b)])


def sideways(edges):
    """{(importing folder, imported folder)} within one layer."""
    pairs = {(folder_of(a), folder_of(b)) for a, b in edges}
    return {(a, b) for a, b in pairs if a != b and LAYER[a] == LAYER[b]}


def code_lines(path):
    """[(number, line)] without blanks, comments, imports and what opens or closes alone; nor a Python signature, which
    belongs to the API and is spelled out wherever clients inspect it."""
    text = path.read_text()
    left_out = set()
    if path.suffix == ".py":
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                left_out |= set(range(node.lineno, node.body[0].lineno))
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                left_out |= set(range(node.lineno, node.end_lineno + 1))
    lines = [(number, line.strip()) for number, line in enumerate(text.splitlines(), 1)]
    idle = r"(//|#(?!define)|[{}()\[\];,]*$)"
    return [(n, line) for n, line in lines if n not in left_out and not re.match(idle, line)]


def repeats(length=10, folder=SOURCE):
    """Pairs of places that share `length` lines of code, whatever is between them in blanks and comments."""
    seen, found = {}, []
    for path in sorted(p for p in folder.rglob("*") if p.suffix in {".py", ".cpp", ".h", ".cu", ".cuh"}):
        lines = code_lines(path)
        end = -1
        for i in range(len(lines) - length + 1):
            window = tuple(line for _, line in lines[i : i + length])
            here = (str(path.relative_to(REPO)), lines[i][0])
            first = seen.setdefault(window, here)
            if first != here and i > end:
                found.append((f"{first[0]}:{first[1]}", f"{here[0]}:{here[1]}"))
                end = i + length - 1
    return found


def layers_as_text():
    """The table of docs/develop/architecture.md, the top layer first."""
    present = {folder_of(module) for module in modules()}
    rows = ["| layer | folders and files |", "|---|---|"]
    for name, folders in reversed(LAYERS.items()):
        rows.append(f"| {name} | {', '.join(f'`{folder}`' for folder in folders.split() if folder in present)} |")
    return "\n".join(rows)


def write():
    """Writes the two tables of docs/develop/architecture.md, each up to the next empty line."""
    text = ARCHITECTURE.read_text()
    for table in (layers_as_text(), walks.as_text("swiglu")):
        rows, *after = table.split("\n\n")
        first = rows.splitlines()[0]
        begin = text.index(first)
        end = text.index("\n\n", begin)
        if after:  # the line of figures
            end = text.index("\n\n", end + 2)
        text = text[:begin] + table + text[end:]
    ARCHITECTURE.write_text(text)


if __name__ == "__main__":
    if "--write" in sys.argv:
        write()
    elif "--figures" not in sys.argv:
        print(layers_as_text(), walks.as_text("swiglu"), sep="\n\n")
    if "--figures" in sys.argv:
        known = modules()
        edges = arrows(known)
        print("circles", *circles(edges), sep="\n  ")
        print("upward", *upward(edges), sep="\n  ")
        print("imports in functions", *imports_in_functions(known), sep="\n  ")
        print("repeats of 10 lines", *repeats(), sep="\n  ")
