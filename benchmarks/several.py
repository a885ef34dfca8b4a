"""Runs benchmarks one after the other in one process, each with cases of its own: PyTorch and the device start once.

python benchmarks/several.py [OPTIONS] BENCH[:ONLY] ...
python benchmarks/several.py --samples 3 --no-autotune "bench_gemm_fp8.py:dgrad,wgrad" bench_mlp.py:cached

OPTIONS go to each bench; ONLY is its --only. Exits 1 if a peer of any bench failed."""

import gc
import importlib
import sys
import time

import torch


def run(given, options):
    """The main() of BENCH[:ONLY]; what it exits with, or None."""
    name, _, only = given.partition(":")
    sys.argv = [name, *options, *(["--only", only] if only else [])]
    try:
        importlib.import_module(name.removesuffix(".py")).main()
    except SystemExit as end:
        return end.code
    finally:
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def main():
    arguments = sys.argv[1:]
    benches = [one for one in arguments if one.startswith("bench_")]
    if not benches:
        sys.exit(__doc__)
    options = [one for one in arguments if one not in benches]
    failed = []
    for given in benches:
        start = time.perf_counter()
        code = run(given, options)
        print(f"several: {given} took {time.perf_counter() - start:.1f} s", flush=True)
        failed += [f"{given}: {code}"] if code else []
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
