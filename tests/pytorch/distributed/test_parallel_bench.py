# Benchmarks of several ranks run: under torchrun, over gloo, at small shapes. Their times are no figures here; their
# counts are checked. Mutant: a column that keeps what it gathered in both modes turns this red.
import csv
import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from torchrun import TORCHRUN

BENCHMARKS = Path(__file__).resolve().parents[3] / "benchmarks"


def rows_module():
    spec = importlib.util.spec_from_file_location("te_benchmarks_rows", BENCHMARKS / "rows.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def run(name, tmp_path):
    """The output of benchmarks/<name>.py on two ranks of the CPU, and its rows."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONSAFEPATH"}
    environment |= {"OMP_NUM_THREADS": "1", "TE_COMMIT": "tested"}
    bench = [str(BENCHMARKS / f"{name}.py"), "--device", "cpu", "--results", str(tmp_path)]
    command = [*TORCHRUN, *bench]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path, timeout=200)
    assert done.returncode == 0, done.stderr[-4000:]
    table = rows_module()
    rows = table.load(tmp_path / "cpux2.csv")
    assert not table.faults(rows)
    return done.stdout, rows


@pytest.mark.dist
def test_products_beside_their_communication(tmp_path):
    """Mutant: a cost without a field in the entry that it prints."""
    said, rows = run("bench_overlap", tmp_path)
    assert {(row["op"], row["direction"]) for row in rows} == {
        ("gather_linear", "forward"),
        ("linear_scatter", "forward"),
        ("gather_linear", "backward"),
        ("gather_linear", "forward+backward"),
    }
    (line,) = [line for line in said.splitlines() if line.startswith('    {"cpu", {')]
    header = (BENCHMARKS.parent / "transformer_engine/common/include/transformer_engine/comm.h").read_text()
    fields = re.findall(r"^  (?:double|int32_t) (\w+);", header.partition("te_comm_costs {")[2].partition("}")[0], re.M)
    assert re.findall(r"\.(\w+) = ", line) == fields
    measured = re.sub(r"\.least_\w+ = 0", "", line)  # which are read off the rows
    assert all(float(value) > 0 for value in re.findall(r" = ([^,}]+)", measured)), line


@pytest.mark.dist
def test_divided_layers(tmp_path):
    """Beside plain torch, divided in the same way, which has no FP8."""
    _, rows = run("bench_parallel_layers", tmp_path)
    own = ("ours", "own auto", "own off", "own undivided")
    wanted = {(f"parallel_{kind}", impl) for kind in ("mlp", "layer") for impl in (*own, "torch async")}
    wanted |= {(f"parallel_{kind}_current", impl) for kind in ("mlp", "layer") for impl in own}
    assert {(row["op"], row["impl"]) for row in rows} == wanted


@pytest.mark.dist
def test_rank_0_of_eight(tmp_path):
    """It checks what it computes. Mutant: a peer that pushes elsewhere than its part of the slot."""
    _, rows = run("bench_overlap8", tmp_path)
    assert {(row["op"], row["impl"]) for row in rows} == {
        (op, impl) for op in ("gather_linear_of_8", "linear_scatter_of_8") for impl in ("ours", "gemm", "push", "floor")
    }


@pytest.mark.dist
def test_it_writes_its_rows_and_its_trace(tmp_path):
    said, rows = run("bench_parallel", tmp_path)
    assert said.count("beyond the undivided layer and the collectives") == 1
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


@pytest.mark.dist
def test_a_machine_need_not_know_any_name(tmp_path):
    """Without /etc/hosts not even the machine's own has an address."""
    alone = ("unshare", "--map-root-user", "--mount")
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True).returncode:
        pytest.skip("needs a file system view of its own: unshare --mount")
    (tmp_path / "hosts").touch()
    code = "import torch.distributed as dist; dist.init_process_group('gloo'); print(dist.get_world_size())"
    command = [*TORCHRUN, "--no-python", sys.executable, "-c", code]
    script = 'test ! -e /etc/hosts || mount --bind hosts /etc/hosts; exec "$@"'
    run = [*alone, "bash", "-euc", script, "bash", *command]
    done = subprocess.run(run, capture_output=True, text=True, cwd=tmp_path, timeout=50)
    assert done.returncode == 0, done.stderr[-4000:]
    assert "".join(done.stdout.split()) == "22", done.stdout  # output of two processes: their lines may be interleaved
