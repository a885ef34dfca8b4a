# benchmarks/again.py: chunks that go on where the last one stopped, on a bench that measures nothing.
import csv
import json
import os
import pathlib

import pytest
from scripts import run_script

BENCHMARKS = pathlib.Path(__file__).parents[2] / "benchmarks"
FAKE = """
from common import Bench, Case

def main():
    bench = Bench("fake")
    for n in (1, 2, 3):
        case = Case("1", "fake", "fp32", (n,), "keeps")
        if bench.selects(case) and bench.selects(case):
            if n == 2:
                raise ValueError("case 2")
            bench.record(case, {"ours": float(n)}, "MiB")
    bench.finish()
"""


@pytest.fixture
def again(tmp_path):
    (tmp_path / "bench_fake.py").write_text(FAKE)
    (tmp_path / "bench_gone.py").write_text("import no_such_module")
    (tmp_path / "bench_peers.py").write_text("import sys\n\ndef main():\n    sys.exit('peers failed')")

    def run(*options, commit="abc1234", bench="bench_fake.py"):
        arguments = ("--results", tmp_path / "rows", bench, *options, "--device", "cpu")
        env = os.environ | {"PYTHONPATH": str(tmp_path), "TE_COMMIT": commit}
        return run_script(BENCHMARKS / "again.py", *arguments, env=env)

    def measured():
        path = tmp_path / "rows/cpu.csv"
        return [row["shape"] for row in csv.DictReader(path.open())] if path.exists() else []

    run.measured = measured
    run.kept = lambda: json.loads((tmp_path / "rows/again.json").read_text())
    return run


def test_chunks_go_on_and_name_what_raised(again):
    none = again("--seconds", "0")
    assert none.returncode == 3 and "3 cases are left" in none.stdout, none.stderr
    assert again.measured() == []
    whole = again()
    assert whole.returncode == 1 and "failed: bench_fake.py 1 fake fp32 2 keeps" in whole.stdout, whole.stderr
    assert "case 2" in whole.stderr and again.measured() == ["1", "3"]
    assert again().returncode == 1 and again.measured() == ["1", "3"], "nothing is measured twice"


def test_another_commit_starts_afresh(again):
    again("--only", "fake fp32 1")
    done = again.kept()
    assert done == {"commit": "abc1234", "done": ["bench_fake.py 1 fake fp32 1 keeps"], "failed": []}
    assert again("--only", "fake fp32 1", commit="def5678").returncode == 0
    assert again.measured() == ["1", "1"] and again.kept()["commit"] == "def5678"


def test_a_bench_that_fails_is_named_itself(again):
    once = again("bench_gone.py")
    assert once.returncode == 1 and "no_such_module" in once.stderr
    assert again.kept()["failed"] == ["bench_fake.py 1 fake fp32 2 keeps", "bench_gone.py"]
    assert again.kept()["done"] == ["bench_fake.py 1 fake fp32 1 keeps", "bench_fake.py 1 fake fp32 3 keeps"]
    again("bench_gone.py")
    assert again.kept()["failed"] == ["bench_fake.py 1 fake fp32 2 keeps", "bench_gone.py"]


def test_peers_that_fail_are_an_error(again):
    found = again(bench="bench_peers.py")
    assert found.returncode == 1 and "peers failed" in found.stdout


CASES_OF_A_GPU = """
import sys
import torch, common
import bench_gemm_fp8, bench_linear, bench_mlp, bench_transformer, bench_tune

class Asked(common.Bench):
    def __init__(self, *args):
        super().__init__(*args)
        self.cuda, self.device = True, torch.device("meta")

    def selects(self, case):
        asked.append(case.op)

for bench in (bench_gemm_fp8, bench_linear, bench_mlp, bench_transformer, bench_tune):
    asked, bench.Bench = [], Asked
    sys.argv = ["bench", "--device", "cpu"]
    bench.main()
    print(bench.__name__, len(asked), asked[-1], flush=True)
"""


def test_a_gpus_cases_are_asked_for_on_a_cpu(tmp_path):
    """Without memory: on the meta device. A wrong loop over a GPU's shapes is found here first."""
    script = tmp_path / "cases.py"
    script.write_text(CASES_OF_A_GPU)
    done = run_script(script, env=os.environ | {"PYTHONPATH": str(BENCHMARKS), "TE_COMMIT": "abc1234"})
    assert done.returncode == 0, done.stderr
    assert "bench_tune 5 layernorm_mlp_tuned" in done.stdout and "bench_transformer 18 " in done.stdout, done.stdout
