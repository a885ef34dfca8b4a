"""Times two builds of the package in turn, in fresh processes on one machine, and reports where head is slower than
base by more than the spread of base. It keeps no rows: the output is valid only for that machine and hour.

python benchmarks/alternate.py --base DIR [--head DIR] [--runs 5] BENCH[:ONLY] ...
python benchmarks/alternate.py --base DIR bench_host.py "bench_transformer.py:H " bench_linear.py bench_mlp.py

DIR: a folder with an installed transformer_engine/; head is by default the installed one. ONLY: the bench's --only.
Both sides run the benches of this checkout, which time only `ours`; on a CPU set OMP_NUM_THREADS. Exits 1 if head is
slower, 2 if a run failed or made no rows."""

import argparse
import collections
import importlib.util
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
import rows as table

FOLDER = pathlib.Path(__file__).resolve().parent
KEYS = ("case", "op", "shape", "dtype", "direction", "unit")


def installed():
    found = importlib.util.find_spec("transformer_engine")
    if found is None:
        sys.exit("alternate: no transformer_engine is installed here; pass --head DIR")
    return pathlib.Path(found.origin).parent.parent


def measure(package, bench, only, options):
    """{case: p50 of ours} of one run of a bench with one package, in its own process."""
    environment = dict(os.environ, PYTHONPATH=str(package), TE_COMMIT="alternate")
    environment.pop("PYTHONSAFEPATH", None)  # a bench imports its harness from beside it
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, str(FOLDER / bench), "--results", folder, "--only", only, "--ours"]
        command += ["--device", options.device] if options.device else []
        done = subprocess.run(command, env=environment, capture_output=True, text=True)
        files = list(pathlib.Path(folder).glob("*.csv"))
        if done.returncode or not files:
            print(done.stdout[-2000:], done.stderr[-4000:], file=sys.stderr)
            print(f"alternate: {bench} ended with {done.returncode} and {len(files)} files", file=sys.stderr)
            sys.exit(2)
        return {tuple(row[key] for key in KEYS): float(row["p50"]) for file in files for row in table.load(file)}


def judge(base, head):
    """(medians of both, spread of base, ratio head / base, whether head is above base by more than that spread)."""
    ours, theirs, spread = float(np.median(base)), float(np.median(head)), max(base) - min(base)
    return ours, theirs, spread, theirs / ours, theirs - ours > spread


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--base", type=pathlib.Path, required=True, help="folder with an installed transformer_engine/")
    parser.add_argument("--head", type=pathlib.Path, help="another; by default where the package is installed")
    parser.add_argument("--runs", type=int, default=5, help="of each side")
    parser.add_argument("--device", default="")
    parser.add_argument("benches", nargs="+", metavar="BENCH[:ONLY]")
    options = parser.parse_args()
    sides = {"base": options.base.resolve(), "head": (options.head or installed()).resolve()}
    for side in sides.values():
        if not (side / "transformer_engine/__init__.py").is_file():
            parser.error(f"{side} holds no transformer_engine/__init__.py; pass the folder that the package is in")
    slower = 0
    for given in options.benches:
        bench, _, only = given.partition(":")
        figures = {name: collections.defaultdict(list) for name in sides}
        for turn in range(options.runs):
            for name in list(sides)[:: -1 if turn % 2 else 1]:  # neither always runs after the other
                for case, figure in measure(sides[name], bench, only, options).items():
                    figures[name][case].append(figure)
        if figures["base"].keys() != figures["head"].keys():
            only_one = sorted(figures["base"].keys() ^ figures["head"].keys())
            print(f"alternate: {bench} has rows of one side alone: {only_one}", file=sys.stderr)
            sys.exit(2)
        for case in figures["base"]:
            ours, theirs, spread, ratio, above = judge(figures["base"][case], figures["head"][case])
            slower += above
            print(
                f"{'  '.join(case):70}  base {ours:.6g}  head {theirs:.6g}  spread {spread:.3g}  ratio {ratio:.4f}"
                f"{'  SLOWER' if above else ''}",
                flush=True,
            )
    print(f"{slower} cases where head is above base by more than base's spread")
    sys.exit(1 if slower else 0)


if __name__ == "__main__":
    main()
