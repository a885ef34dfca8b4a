# Rules on the text of the repository: nothing unfinished, no paths and hosts of one machine, environment variables
# documented, a first line in each file.
import re
from pathlib import Path

REPO = Path(__file__).parents[2]
FOLDERS = [
    "build_backend",
    "transformer_engine",
    "transformer_engine_torch",
    "tests",
    "examples",
    "benchmarks",
    "qa",
    "cmake",
    "docs",
    ".ci",
]
CODE = {".py", ".cpp", ".cu", ".cuh", ".h", ".cmake", ".sh"}

FILES = sorted(
    p
    for top in [*(REPO / f for f in FOLDERS), *REPO.glob("*")]
    for p in (top.rglob("*") if top.name in FOLDERS else [top])
    if p.is_file() and "__pycache__" not in p.parts
)
TEXT = [p for p in FILES if p.suffix in CODE | {".md", ".txt", ".toml", ".json", ".yaml"} or p.parent.name == ".ci"]


def name(path):
    return str(path.relative_to(REPO))


def hits(pattern, paths):
    found = []
    for path in paths:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if path != Path(__file__) and re.search(pattern, line):
                found.append(f"{name(path)}:{number}: {line.strip()[:100]}")
    return found


def test_nothing_is_left_unfinished_in_words():
    assert not hits(r"\b(TODO|FIXME|XXX|HACK)\b", [p for p in TEXT if p.suffix in CODE])


def test_no_absolute_path_or_host_of_one_machine():
    paths = r"(?<![\w.$}])/(work|root|home/\w+|Users|mnt)/"
    hosts = r"index-url|/simple/"
    assert not hits(f"{paths}|{hosts}", TEXT)


def test_processes_find_each_other_without_names():
    """Without /etc/hosts the name `localhost` does not resolve, which --standalone needs."""
    assert not hits(r"localhost|--standalone", [p for p in TEXT if p.name not in ("torchrun.py", "troubleshooting.md")])


def variables_read():
    patterns = {
        ".py": r"""(?:environ(?:\.get|\.setdefault|\.pop)?[\[(]|getenv\()\s*["'](\w+)["']""",
        ".cpp": r'getenv\("(\w+)"\)',
        ".h": r'getenv\("(\w+)"\)',
        ".cmake": r"\$ENV\{(\w+)\}",
        ".sh": r"\$\{([A-Z][A-Z0-9_]+):[-+]",
    }
    read = {}
    for path in FILES:
        pattern = patterns.get(path.suffix if path.name != "CMakeLists.txt" else ".cmake")
        for variable in re.findall(pattern, path.read_text()) if pattern else []:
            read.setdefault(variable, name(path))
    return read


def test_every_environment_variable_is_documented_and_every_documented_one_is_read():
    documented = set(re.findall(r"^\| `(\w+)` \|", (REPO / "docs/reference/environment.md").read_text(), re.M))
    read = variables_read()
    assert "MAX_JOBS" in read, "the search found nothing"
    undocumented = {v: where for v, where in read.items() if v not in documented}
    assert not undocumented, f"add these to docs/reference/environment.md: {undocumented}"
    assert not documented - set(read), "documented, but nothing reads them"


def test_golden_results_are_stored():
    assert [p for p in (REPO / "tests/goldens").glob("*") if p.stat().st_size > 0]


def test_every_file_begins_with_a_comment():
    missing = []
    for path in FILES:
        if path.suffix not in CODE:
            continue
        lines = path.read_text().splitlines()
        first = next((line for line in lines if not line.startswith("#!")), "")
        if lines and not re.match(r'#|//|/\*|r?"""', first):
            missing.append(name(path))
    assert not missing, f"the first line of each file is a comment on what it is for; not so in {missing}"
