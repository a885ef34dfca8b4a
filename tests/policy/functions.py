# Finds every function of the source with the length of its body: Python through ast, C++ and CUDA through a scanner
# of comments, literals and braces, without types. It raises for a file whose braces do not match.
import ast
import re
from pathlib import Path
from typing import NamedTuple

CPP = {".cpp", ".h", ".cu", ".cuh"}

# Blanked before braces are counted: comments, raw and plain strings, characters, preprocessor lines. A quote
# between digits separates them and opens no character.
BLANKED = re.compile(
    r"""//[^\n]*(?:\\\n[^\n]*)*|/\*.*?\*/|R"(?P<mark>[^\s()\\]{0,16})\(.*?\)(?P=mark)"|"(?:\\.|[^"\\\n])*"
    |(?<![0-9A-Fa-f])'(?:\\.|[^'\\\n])+'|^[ \t]*\#(?:\\\n|[^\n])*""",
    re.S | re.M | re.X,
)
# The head of a scope in which functions are declared.
SCOPE = re.compile(r"(?:^|[\s;>)])(?:namespace|extern|class|struct|union|enum)\b")
QUALIFIERS = r"(?:\s+(?:const|noexcept(?:\([^()]*\))?|override|final|mutable|try)|\s*->\s*[\w:<>,&*\s()]+)*"
PARAMETERS_END = re.compile(r"\)" + QUALIFIERS + r"\s*$")
INITIALIZERS = re.compile(r"\)" + QUALIFIERS + r"\s*:(?!:)")
ATTRIBUTES = re.compile(r"\[\[.*?\]\]|__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)|__attribute__\s*\(\(.*?\)\)")
NAME = re.compile(r"((?:[\w~]+(?:<[^()<>]*>)?::)*(?:operator\s*(?:\(\)|[^\s\w(]+)|operator\s+\w+|~?\w+))\s*\(")


class Function(NamedTuple):
    path: str
    name: str
    line: int  # where its body begins
    lines: int  # of the body, without signature, docstring and the braces' lines
    head: str  # C++: everything before the body, for what it is (a kernel, a registration)
    body: str  # C++: without comments and texts


def blanked(text):
    """The text with spaces in place of comments, literals and preprocessor lines; lines keep their numbers."""
    return BLANKED.sub(lambda m: re.sub(r"[^\n]", " ", m[0]), text)


def closing(text, start):
    """Index of the brace that closes the one at `start`."""
    depth = 0
    for m in re.compile(r"[{}]").finditer(text, start):
        depth += 1 if m[0] == "{" else -1
        if depth == 0:
            return m.start()
    raise ValueError(f"line {text.count(chr(10), 0, start) + 1}: a brace that nothing closes")


def without_templates(head):
    """The head without `template <...>` and attributes, whose parentheses are no parameters."""
    head = re.sub(
        r"\[\[.*?\]\]|__launch_bounds__\s*\([^()]*(?:\([^()]*\)[^()]*)*\)|__attribute__\s*\(\(.*?\)\)", " ", head
    )
    while m := re.search(r"\btemplate\s*<", head):
        depth, at = 1, m.end()
        while depth and at < len(head):
            depth += {"<": 1, ">": -1}.get(head[at], 0)
            at += 1
        head = head[: m.start()] + " " + head[at:]
    return head.strip()


def cpp_functions(text, path=""):
    """Every function of a namespace or a class; a lambda or a class inside of a function belongs to it."""
    code = blanked(text)
    found, begin, at, depth = [], 0, 0, 0
    token = re.compile(r"[{};]")
    while m := token.search(code, at):
        at = m.end()
        if m[0] == ";":
            begin = at if code.count("(", begin, at) == code.count(")", begin, at) else begin
            continue
        if m[0] == "}":
            depth -= 1
            begin = at
            if depth < 0:
                raise ValueError(f"{path}:{code.count(chr(10), 0, at) + 1}: a brace that nothing opened")
            continue
        head = re.sub(r"^(?:\s*(?:public|private|protected)\s*:)+", "", code[begin : m.start()])
        plain = without_templates(head)
        unfinished = plain.count("(") > plain.count(")")  # a default argument in braces
        members = INITIALIZERS.search(plain)
        if not unfinished and (PARAMETERS_END.search(plain) or (members and plain.endswith((")", "}")))):
            end = closing(code, m.start())
            line = code.count("\n", 0, m.start()) + 1
            name = NAME.search(plain)
            lines = code.count("\n", m.start(), end) - 1
            body = code[m.end() : end]
            head = " ".join(head.split())
            found.append(Function(path, name[1] if name else plain[:40], line, max(lines, 0), head, body))
            at = begin = end + 1
        elif not unfinished and SCOPE.search(plain) and "=" not in plain.split("(")[0] and not members:
            depth += 1
            begin = at
        else:  # a value in braces: of a variable, of a member, of a default argument
            at = closing(code, m.start()) + 1
    if depth:
        raise ValueError(f"{path}: {depth} braces that nothing closes")
    return found


def python_functions(text, path=""):
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            documented = ast.get_docstring(node) is not None
            body = node.body[1:] if documented else node.body
            lines = node.end_lineno - body[0].lineno + 1 if body else 0
            segment = "\n".join(text.splitlines()[node.body[0].lineno - 1 : node.end_lineno])
            found.append(Function(path, node.name, node.lineno, lines, "", segment))
    return found


def functions(path, root):
    read = python_functions if Path(path).suffix == ".py" else cpp_functions
    return read(path.read_text(), str(path.relative_to(root)))
