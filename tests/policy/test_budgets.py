# Budgets of files and functions. A file that is over has two ideas in it; so has a function, whose signature and
# docstring do not count. functions.py finds the functions.
import re
from pathlib import Path

import functions

REPO = Path(__file__).parents[2]
FOLDERS = [".ci", "benchmarks", "build_backend", "cmake", "examples", "qa", "tests", "transformer_engine"]
FOLDERS += ["transformer_engine_torch"]
PRODUCT_FILE, OTHER_FILE = 600, 400
BODY, KERNEL_OR_REGISTRATION = 80, 130


def sources(suffixes):
    files = (p for folder in FOLDERS for p in sorted((REPO / folder).rglob("*")))
    return [p for p in files if p.suffix in suffixes and "__pycache__" not in p.parts]


def budget(function):
    """Of a body: a kernel is one function for its registers' sake, a registration is a table."""
    kernel = re.search(r"\b__(global|device)__\b", function.head)
    registration = re.search(r"\bTE_OP_REGISTRATION\b|\bvoid register_\w+ ?\(", function.head)
    return KERNEL_OR_REGISTRATION if kernel or registration else BODY


def over(found):
    """[(file, function, lines, budget)] of those that are over their budget."""
    return [(f"{f.path}:{f.line}", f.name, f.lines, budget(f)) for f in found if f.lines > budget(f)]


def test_files_are_within_their_budget():
    sizes = {p.relative_to(REPO): len(p.read_text().splitlines()) for p in sources(functions.CPP | {".py", ".sh"})}
    assert len(sizes) > 900, "the search found hardly anything"
    limits = {p: PRODUCT_FILE if p.parts[0] == "transformer_engine" else OTHER_FILE for p in sizes}
    assert not {str(p): n for p, n in sizes.items() if n > limits[p]}


def test_python_functions_are_within_their_budget():
    found = [f for p in sources({".py"}) for f in functions.functions(p, REPO)]
    assert len(found) > 7000, "the search found hardly anything"
    assert not over(found)


def test_cpp_functions_are_within_their_budget():
    found = [f for p in sources(functions.CPP) for f in functions.functions(p, REPO)]
    assert len(found) > 3500, "the search found hardly anything"
    assert not over(found)


SAMPLE = r"""
#define OPEN(x) void x() {
namespace a::b {  // { a comment's brace does not count
extern "C" {
struct Pair : Base<int(char)> {
  int first{1}, second = {2};
  Pair(int given) : first{given}, second(given) {
    one();
  }
  explicit operator bool() const noexcept { return first; }
  template <class T = decltype(f())>
  auto operator()(T x = {}) const -> decltype(x) {
    auto inner = [&](int y) {
      return y;
    };
    return inner(x);
  }
};
constexpr int kTable[] = {1, 2};
const char* brace() {
  const char c = '{', *raw = R"({{{)";
  return "}" /* } */;
}
template <class T>
__global__ void __launch_bounds__(min(256, 8)) kernel(T* x) {
  if (x) {
    *x = 1'000;
  }
}
TE_OP_REGISTRATION(op, registration) {
  registration.op("x");
}
}  // extern "C"
}  // namespace a::b
"""


def test_functions_of_cpp_are_found_with_their_lengths():
    found = functions.cpp_functions(SAMPLE)
    assert [(f.name, f.lines) for f in found] == [
        ("Pair", 1),
        ("operator bool", 0),
        ("operator()", 4),
        ("brace", 2),
        ("kernel", 3),
        ("TE_OP_REGISTRATION", 1),
    ]
    assert [budget(f) for f in found] == [BODY] * 4 + [KERNEL_OR_REGISTRATION] * 2


def test_functions_of_python_are_found_with_their_lengths():
    source = (
        'def outer(\n    a,\n):\n    """Not counted."""\n    x = 1\n\n    def inner():\n        pass\n\n    return x\n'
    )
    assert [(f.name, f.lines) for f in functions.python_functions(source)] == [("outer", 6), ("inner", 1)]


def test_a_function_over_its_budget_is_named():
    long = "void f() {\n" + "  g();\n" * 81 + "}\n"
    assert over(functions.cpp_functions(long, "x.cpp")) == [("x.cpp:1", "f", 81, 80)]
    assert not over(functions.cpp_functions("__device__ " + long, "x.cpp"))
