"""Every benchmark again at one commit, in chunks: a chunk starts no case after its seconds, and the next one goes on.

python benchmarks/again.py --results DIR [--seconds 540] [BENCH ...] [OPTIONS]

Run the same command until it exits 0; it exits 3 while cases are left. DIR keeps the rows and which cases are done
(again.json), so a chunk may run on another machine of the same kind if DIR travels; another commit starts afresh.
BENCH: default all that need one device. OPTIONS go to each bench. A case that raises is named, and is not tried again;
on a GPU the chunk ends there, since the error may hold for all that follows in its process.
Merge the rows with report.py --merge DIR/<device>.csv."""

import argparse
import json
import pathlib
import sys
import time
import traceback

import common
import rows
import several
import torch

LEFT = 3  # exit code while cases are left


class Progress:
    """Which cases of a commit are done, in a file; asked by Bench.selects() before each case."""

    def __init__(self, path, commit, seconds):
        self._path, self._end = path, time.monotonic() + seconds
        there = json.loads(path.read_text()) if path.exists() else {}
        same = there.get("commit") == commit
        self._kept = there if same else {"commit": commit, "done": [], "failed": []}
        self._granted, self.bench, self.left = [], "", set()

    def begin(self, bench):
        self.bench, self._granted = bench, []

    @property
    def failed(self):
        return self._kept["failed"]

    def starts(self, case):
        """Whether a case is measured now. Those granted before it in this bench are done."""
        name = f"{self.bench} {case}"
        if name in self._granted:  # a bench may ask twice
            return True
        if name in self._kept["done"] or name in self.failed:
            return False
        if time.monotonic() >= self._end:
            self.left.add(name)
            return False
        self.close()
        self._granted.append(name)
        return True

    def close(self):
        """The granted cases are done."""
        self._kept["done"] += [name for name in self._granted if name not in self._kept["done"]]
        self._write()

    def fail(self):
        """The last granted case has raised; without one, the bench itself."""
        self.failed.append(self._granted.pop() if self._granted else self.bench)
        self.close()

    def _write(self):
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(json.dumps(self._kept, indent=1) + "\n")


def one_device():
    """The benches of one process; ranks are started by torch.distributed.run (qa/L3_perf)."""
    found = sorted(path.name for path in pathlib.Path(__file__).parent.glob("bench_*.py"))
    return [name for name in found if not name.endswith("parallel.py")]


def exit_code_of(bench, progress, options):
    """Runs a bench to its end, without the cases that raise."""
    while bench not in progress.failed:
        progress.begin(bench)
        try:
            code = several.run(bench, options)
        except Exception:
            traceback.print_exc()
            progress.fail()
            if torch.cuda.is_initialized():
                print(f"again: {bench} raised; run the same command again", flush=True)
                sys.exit(LEFT)
            continue
        progress.close()
        if code:
            print(f"again: {bench}: {code}", flush=True)
        return code
    return 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=pathlib.Path, required=True)
    parser.add_argument("--seconds", type=float, default=540.0)
    given, others = parser.parse_known_args()
    benches = [one for one in others if one.startswith("bench_")] or one_device()
    options = ["--results", str(given.results), *(one for one in others if not one.startswith("bench_"))]
    progress = Progress(given.results / "again.json", rows.commit(), given.seconds)
    common.Bench.chunk = progress.starts
    codes = [exit_code_of(bench, progress, options) for bench in benches]
    for name in progress.failed:
        print(f"again: failed: {name}")
    if progress.left:
        print("\n".join(f"again: left: {name}" for name in sorted(progress.left)))
        print(f"again: {len(progress.left)} cases are left; run the same command again")
        sys.exit(LEFT)
    sys.exit(bool(progress.failed or any(codes)))


if __name__ == "__main__":
    main()
