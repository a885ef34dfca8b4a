# Runs the mutants of mutants.toml: each is one change of the source that one test has to find. A mutant that no test
# finds fails, and so does one whose test fails without it.
#
# usage: python tests/mutants.py [--build python|extension|engine] [PATTERN]
# PATTERN is a part of the mutants' names. The package must be installed (qa/setup.sh); each mutant runs over a copy of
# it, whose libraries are links. A mutant of Python takes the time of its test. One of C++ builds in build/mutants, a
# copy of the sources that is kept, without CUDA, as no mutant is in a .cu file: the first one of the engine takes a
# minute, the first one of the extension some minutes, and every later one what depends on its file.
import argparse
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import tomllib
except ImportError:  # Python 3.10, where pytest brings the same parser
    import tomli as tomllib


REPO = Path(__file__).parents[1]
TABLE = REPO / "tests/mutants.toml"
BUILDS = ("python", "extension", "engine")
ENVIRONMENT = {"PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


class Invalid(Exception):
    """A mutant that cannot be judged: its text is not there, it does not build, or its test does not run."""


def read():
    return tomllib.loads(TABLE.read_text())["mutant"]


def sources():
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=REPO, capture_output=True, check=True, text=True).stdout
    return [name for name in listed.split("\0") if name and (REPO / name).is_file()]


def mirror(folder):
    """The sources in `folder`; files that did not change keep their time, so that builds stay incremental."""
    for name in sources():
        target = folder / name
        if not target.exists() or target.read_bytes() != (REPO / name).read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(REPO / name, target)


def mutated(mutant, text):
    count = text.count(mutant["find"])
    if count != 1:
        raise Invalid(f"`find` is {count} times in {mutant['file']}, wanted once")
    return text.replace(mutant["find"], mutant["replace"])


def run_test(repo, site, test):
    """Whether the test passes over the package in `site`, and the end of its output."""
    if test.endswith(".cpp"):
        command = [str(repo / "build/engine/tests/cpp" / Path(test).stem), "--gtest_brief=1", "--gtest_fail_fast"]
    else:
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", test]
    environment = os.environ | ENVIRONMENT | {"PYTHONPATH": str(site)}
    try:
        done = subprocess.run(command, cwd=repo, env=environment, capture_output=True, text=True, timeout=900)
    except subprocess.TimeoutExpired:
        return False, "no end after 900 s"
    # pytest: 1 where tests failed, less than 0 where one crashed, others where none ran
    if done.returncode > 1 and not test.endswith(".cpp"):
        raise Invalid(f"{test} did not run: {done.stdout[-2000:]}{done.stderr[-2000:]}")
    return done.returncode == 0, "\n".join(done.stdout.splitlines()[-3:])


def copy_installed(site):
    """The installed package in `site`: libraries are links."""
    for package in ("transformer_engine", "transformer_engine_torch"):
        installed = Path(importlib.util.find_spec(package).origin).parent
        for path in installed.rglob("*"):
            target = site / package / path.relative_to(installed)
            if path.is_dir() or "__pycache__" in path.parts:
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".so":
                target.symlink_to(path.resolve())
            else:
                shutil.copyfile(path, target)


class PythonTree:
    """A copy of the sources and of the installed package for each mutant."""

    def __init__(self):
        self.folder = Path(tempfile.mkdtemp(prefix="te_mutant_"))
        self.repo, self.site = self.folder / "repo", self.folder / "site"
        mirror(self.repo)
        copy_installed(self.site)

    def places(self, file):
        return [folder / file for folder in (self.repo, self.site) if (folder / file).exists()]

    def build(self, test):
        pass

    def close(self):
        shutil.rmtree(self.folder)


class BuiltTree:
    """build/mutants: the sources, what is built of them, and the installed package with the libraries built here. kind:
    'engine' (and its suites), or 'extension' (and the engine)."""

    def __init__(self, kind):
        self.folder = REPO / "build/mutants"
        self.repo, self.site = self.folder / "repo", self.folder / f"site-{kind}"
        self.built, self.extension = self.repo / f"build/{kind}", kind == "extension"
        mirror(self.repo)
        shutil.rmtree(self.site, ignore_errors=True)
        copy_installed(self.site)

    def places(self, file):
        return [self.repo / file]

    def build(self, test):
        def call(*command):
            done = subprocess.run(command, cwd=self.repo, capture_output=True, text=True)
            if done.returncode:
                raise Invalid(f"it does not build: {done.stdout[-2000:]}{done.stderr[-2000:]}")

        if not (self.built / "build.ninja").exists():
            options = {
                "CMAKE_BUILD_TYPE": "Release",
                "TE_WITH_CUDA": "OFF",
                "TE_UNITY": "ON",
                "TE_BUILD_PYTORCH": "ON" if self.extension else "OFF",
                "TE_BUILD_TESTS": "OFF" if self.extension else "ON",
                "Python_EXECUTABLE": sys.executable,
            }
            call(
                "cmake", "-G", "Ninja", "-B", str(self.built), *(f"-D{name}={value}" for name, value in options.items())
            )
        suite = Path(test).stem if test.endswith(".cpp") else None
        target = suite or ("_C" if self.extension else "transformer_engine")
        call("cmake", "--build", str(self.built), "--target", target)
        if suite is None:
            for library in self.site.rglob("libtransformer_engine.so" if not self.extension else "*.so"):
                library.unlink()  # a link to the installed one
            call("cmake", "--install", str(self.built), "--prefix", str(self.site))

    def close(self):
        pass


def run(mutant, baselines):
    """Returns "found", or the reason of a failure."""
    tree = PythonTree() if mutant["build"] == "python" else BuiltTree(mutant["build"])
    try:
        test = mutant["test"]
        if (mutant["build"], test) not in baselines:
            tree.build(test)
            baselines[mutant["build"], test] = run_test(tree.repo, tree.site, test)
        passed, output = baselines[mutant["build"], test]
        if not passed:
            return f"{test} fails without it: {output}"
        before = {path: path.read_text() for path in tree.places(mutant["file"])}
        try:
            for path, text in before.items():
                path.write_text(mutated(mutant, text))
            tree.build(test)
            passed, output = run_test(tree.repo, tree.site, test)
        finally:
            for path, text in before.items():
                path.write_text(text)
        return f"{test} does not find it" if passed else "found"
    except Invalid as error:
        return str(error)
    finally:
        tree.close()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("pattern", nargs="?", default="")
    parser.add_argument("--build", choices=BUILDS)
    options = parser.parse_args()
    mutants = [m for m in read() if options.pattern in m["name"] and options.build in (None, m["build"])]
    baselines, failed = {}, 0
    for mutant in mutants:
        outcome = run(mutant, baselines)
        failed += outcome != "found"
        print(f"{mutant['name']}: {outcome}", flush=True)
    print(f"{len(mutants) - failed} of {len(mutants)} mutants were found")
    return failed > 0 or not mutants


if __name__ == "__main__":
    sys.exit(main())
