# benchmarks/bench_parallel.py runs: under torchrun, over gloo, at small shapes. What it times here is no figure; what
# it counts is. Mutant: a column that keeps what it gathered in both modes turns this red.
import csv
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def rows_module():
    spec = importlib.util.spec_from_file_location("te_benchmarks_rows", BENCHMARKS / "rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.dist
def test_it_writes_its_rows_and_its_trace(tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "TE_COMMIT": "tested"}
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node=2"]
    bench = [str(BENCHMARKS / "bench_parallel.py"), "--device", "cpu", "--results", str(tmp_path)]
    done = subprocess.run([*launch, *bench], capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stdout.count("beyond the undivided layer and the collectives") == 1
    table = rows_module()
    rows = table.load(tmp_path / "cpux2.csv")
    assert not table.faults(rows)
    found = {(row["op"], row["direction"], row["impl"]): float(row["p50"]) for row in rows}
    assert {key[:2] for key in found} == {
        ("parallel_linear_host", "forward+backward"),
        ("parallel_pair", "keeps"),
        ("parallel_pair", "forward+backward"),
        ("parallel_keeping", "keeps"),
    }
    assert found["parallel_keeping", "keeps", "ours"] == found["parallel_keeping", "keeps", "predicted"]
    kept = [found["parallel_pair", "keeps", way] for way in ("ours", "own keep", "torch eager")]
    assert kept[0] < kept[1] <= kept[2]
    with (tmp_path / "parallel_memory_cpux2.csv").open() as file:
        trace = list(csv.reader(file))
    assert trace[0][1:] == ["ours", "own keep", "torch eager"] and len(trace) == 1 + 2 + 2 * 2 * 4
