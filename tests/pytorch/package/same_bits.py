# Whether two builds of the package do the same to the bit: runs the cases of same_bits_cases.py with base and head,
# side by side on this machine with the same threads, and compares hashes of outputs, gradients, saved tensors, state.
#
#   python tests/pytorch/package/same_bits.py --base DIR [--head DIR] [--device cuda] [--only WORDS ...] [--jobs N]
#
# A DIR holds an installed transformer_engine/ (`pip install --target`); head is by default what is installed here. A
# CPU core takes about five minutes for all cases of a side. No hash is kept: hashes depend on machine and threads.
import argparse
import collections
import importlib.util
import json
import os
import pathlib
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor

CHILD = pathlib.Path(__file__).with_name("same_bits_runs.py")


def installed():
    found = importlib.util.find_spec("transformer_engine")
    if found is None:
        sys.exit("same_bits: no transformer_engine is installed here; pass --head DIR.")
    return str(pathlib.Path(found.origin).parent.parent)


def run_part(package, part, options, backwards):
    """{case: {what: hash}} of a part of the cases. A process that dies ends its case, not the rest."""
    environment = dict(os.environ, PYTHONPATH=package, OMP_NUM_THREADS=str(options.threads))
    environment.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    results, begun = {}, 0
    while True:
        command = [sys.executable, str(CHILD), "--package", package, "--device", options.device, "--part", part]
        command += ["--skip", str(begun)] + (["--backwards"] if backwards else [])
        command += [] if options.only is None else ["--only", *options.only]
        with tempfile.TemporaryFile("w+") as errors:
            child = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=errors, text=True)
            running = None
            for line in child.stdout:
                said = json.loads(line)
                running = said["case"] if "results" not in said else None
                begun += running is not None
                if running is None:
                    results[said["case"]] = said["results"]
            code = child.wait()
            errors.seek(0)
            last = "".join(errors.readlines()[-5:])
        if code == 0:
            return results
        if running is None:
            sys.exit(f"same_bits: the process of {package} ended with {code}, outside of any case: {last}")
        results[running] = {"error type": f"process ended with {code}"}


def run_sides(sides, options):
    parts = [f"{i}/{options.jobs}" for i in range(options.jobs)]
    with ThreadPoolExecutor(len(sides) * options.jobs) as pool:
        waiting = [[pool.submit(run_part, side, part, options, i and options.head_backwards) for part in parts]
                   for i, side in enumerate(sides)]  # fmt: skip
        return [{name: case for part in side for name, case in part.result().items()} for side in waiting]


def differences(base, head, *, messages=True):
    """(case, what) of each thing that is not the same, or that one side alone has."""
    found = []
    for name in sorted(base.keys() | head.keys()):
        if name not in base or name not in head:
            found.append((name, f"only {'base' if name in base else 'head'} ran it"))
            continue
        ours, theirs = base[name], head[name]
        for what in sorted(ours.keys() | theirs.keys()):
            if what == "error text" and not (messages and what in ours and what in theirs):
                continue
            if what not in ours or what not in theirs:
                side = ours if what in ours else theirs
                of = "base" if what in ours else "head"
                shown = f": {side[what]} {side.get('error text', '')}" if what == "error type" else ""
                found.append((name, f"{what}: only {of} has it{shown}"))
            elif ours[what] != theirs[what]:
                shown = f": {ours[what]!r} -> {theirs[what]!r}" if what.startswith("error") or "bytes" in what else ""
                found.append((name, what + shown))
    return found


def main():
    parser = argparse.ArgumentParser(description="Whether two builds of the package do the same to the bit.")
    parser.add_argument("--base", required=True, help="folder with an installed transformer_engine/")
    parser.add_argument("--head", help="another; by default where the package is installed")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only", nargs="+", metavar="WORDS", help="cases whose name has all words of one of these")
    parser.add_argument("--jobs", type=int, default=1, help="processes of each side")
    parser.add_argument("--threads", type=int, default=1, help="of each process")
    parser.add_argument("--ignore-messages", action="store_true", help="of errors compare the types alone")
    parser.add_argument("--head-backwards", action="store_true", help="head runs the cases in the other order")
    parser.add_argument("--most", type=int, default=100, help="differences to print")
    options = parser.parse_args()
    sides = [os.path.abspath(side) for side in (options.base, options.head or installed())]
    for side in sides:
        if not os.path.isfile(os.path.join(side, "transformer_engine", "__init__.py")):
            parser.error(f"{side} holds no transformer_engine/__init__.py; pass the folder that the package is in")
    base, head = run_sides(sides, options)
    if not base:
        parser.error(f"no case has the words {options.only}")
    found = differences(base, head, messages=not options.ignore_messages)
    for name, what in found[: options.most]:
        print(f"{name}: {what}")
    if len(found) > options.most:
        print(f"... and {len(found) - options.most} more")
    for what, count in collections.Counter(what.split(":")[0] for _, what in found).most_common(12):
        print(f"  {count:6} x {what}")
    refused = sum("error type" in case for case in base.values())
    hashes = sum(map(len, base.values()))
    print(f"{len(base)} cases, {hashes} hashes, {refused} cases refused or raised in base;", end=" ")
    print(f"{len(found)} differences in {len({name for name, _ in found})} cases" if found else "all the same")
    sys.exit(1 if found else 0)


if __name__ == "__main__":
    main()
