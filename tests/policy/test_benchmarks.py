"""The benchmark rows are well formed and add up, and the tools that write, merge and judge them do. It times
nothing."""

import collections
import csv
import importlib.util
import os
import pathlib
import re
import subprocess
import sys
import weakref

import pytest
from scripts import run_script

BENCHMARKS = pathlib.Path(__file__).resolve().parents[2] / "benchmarks"
RESULTS = sorted((BENCHMARKS / "results").glob("*.csv"))
OLD_HEADER = (
    "case,op,impl,dtype,shape,direction,p20,p50,p80,unit,bytes_or_flops,peer,ratio,gpu,driver,cuda,torch,commit,date"
)
HEADER = f"{OLD_HEADER},timing,sm_mhz,watts"


def load(name):
    spec = importlib.util.spec_from_file_location(f"te_benchmarks_{name}", BENCHMARKS / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


rows, targets, timing = load("rows"), load("targets"), load("timing")


def run(*args, **env):
    """Runs a script of benchmarks/ as a user does: its own folder on the path, the checkout's root not."""
    inherited = {key: value for key, value in os.environ.items() if key not in ("PYTHONSAFEPATH", "TE_COMMIT")}
    command = [sys.executable, *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, env=inherited | env, cwd=BENCHMARKS.parent)


def good_rows():
    """Ours, its two peers' ratios, and the peers: case 1 on an H200, its rate 2% under the target, its ratio above."""
    base = {"case": "1", "op": "swiglu", "dtype": "bf16", "shape": "16384x14336", "direction": "forward", "unit": "us"}
    base |= {"bytes_or_flops": "1409286144", "gpu": "NVIDIA H200", "driver": "580.1", "cuda": "13.0", "torch": "2.11.0"}
    base |= {"commit": "abc1234", "date": "2026-11-21T00:00:00Z", "peer": "", "ratio": ""}
    base |= {"timing": "burst", "sm_mhz": "1980", "watts": "512.5"}
    times = {"ours": 350.0, "torch compile": 346.5, "copy_": 332.5}
    made = []
    for impl, time in times.items():
        row = base | {"impl": impl, "p20": str(time - 1), "p50": str(time), "p80": str(time + 1)}
        peers = [peer for peer in times if peer != "ours"] if impl == "ours" else []
        made += [row | {"peer": peer, "ratio": f"{times[peer] / time:.6g}"} for peer in peers] or [row]
    return [{key: row[key] for key in HEADER.split(",")} for row in made]


def write(path, content):
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, HEADER.split(","), lineterminator="\n")
        writer.writeheader()
        writer.writerows(content)


@pytest.mark.parametrize("path", RESULTS, ids=lambda path: path.name)
def test_committed_rows(path):
    assert path.read_text().partition("\n")[0] in (HEADER, OLD_HEADER)
    content = rows.load(path)
    assert content and rows.faults(content) == []
    assert all(not row["commit"].endswith("-dirty") for row in content)


def test_good_rows_have_no_faults():
    assert rows.faults(good_rows()) == []


def test_a_peer_is_timed_as_ours():
    """One case, timed in two ways within the second of its date."""
    twice = [row | {key: str(2 * float(row[key])) for key in ("p20", "p50", "p80")} for row in good_rows()]
    assert rows.faults(good_rows() + [row | {"timing": "prepared"} for row in twice]) == []


@pytest.mark.parametrize(
    "column, value",
    [("p50", "nan"), ("p50", "0"), ("p20", "999"), ("dtype", "float32"), ("direction", "fwd"), ("unit", "ms")]
    + [("commit", ""), ("bytes_or_flops", "many"), ("ratio", "1.5"), ("ratio", ""), ("peer", "")]
    + [("timing", "quick"), ("sm_mhz", "-1"), ("watts", "nan")],
    ids=lambda value: value or "empty",
)
def test_faults_are_found(column, value):
    content = good_rows()
    content[0][column] = value
    assert rows.faults(content)


def test_a_peers_row_names_no_peer():
    content = good_rows()
    content[-1] |= {"peer": "torch eager", "ratio": "1"}
    assert rows.faults(content)


def test_a_foreign_header_is_refused(tmp_path):
    path = tmp_path / "h200.csv"
    path.write_text("case,op\n1,swiglu\n")
    with pytest.raises(ValueError, match=r"h200\.csv: header"):
        rows.load(path)


def test_rows_of_before_the_gpus_readings_are_read_and_kept(tmp_path):
    path, added = tmp_path / "h200.csv", {"timing": "", "sm_mhz": "", "watts": ""}
    lines = [",".join(row[key] for key in OLD_HEADER.split(",")) for row in good_rows()]
    path.write_text("\n".join([OLD_HEADER, *lines, ""]))
    old = [row | added for row in good_rows()]
    assert rows.load(path) == old and rows.faults(old) == []
    rows.append(path, good_rows())
    assert path.read_text().partition("\n")[0] == HEADER and rows.load(path) == [*old, *good_rows()]


def test_targets_are_unique_and_well_named():
    assert collections.Counter(targets.TARGETS).most_common(1)[0][1] == 1
    for target in targets.TARGETS:
        assert target.dtype in rows.DTYPES and target.direction in rows.DIRECTIONS, target
        assert target.measure in ("GB/s", "TFLOP/s", "us", "MiB") or target.measure.startswith("x "), target


def test_report_lists_every_target_on_the_committed_results():
    report = run(BENCHMARKS / "report.py")
    assert report.returncode == 0, report.stderr
    lines = report.stdout.split("\n\n")[0].splitlines()[1:]
    assert len(lines) >= len(targets.TARGETS) and all("fp8" in line for line in lines[len(targets.TARGETS) :])
    assert run(BENCHMARKS / "report.py", "--markdown").returncode == 0


def test_the_page_of_results_equals_the_rows():
    made = run(BENCHMARKS / "report.py", "--markdown").stdout
    assert (BENCHMARKS.parent / "docs/reference/results.md").read_text() == made, "run `bash qa/regenerate.sh`"


def test_no_figure_is_stored_or_scaled():
    """Another library's time has no row here: it was not measured in one process with ours."""
    for path in RESULTS:
        assert not [row for row in rows.load(path) if re.search(r"\bte\b|scaled", row["impl"] + " " + row["peer"])]


@pytest.mark.slow
def test_the_charts_are_drawn(tmp_path):
    done = run(BENCHMARKS / "charts.py", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    docs = BENCHMARKS.parent / "docs/images"
    for stem in ("speed_h200", "memory_h200"):
        assert (tmp_path / f"{stem}.png").read_bytes().startswith(b"\x89PNG") and (docs / f"{stem}.png").exists()
        drawn, kept = ((folder / f"{stem}.svg").read_text() for folder in (tmp_path, docs))
        words = re.findall(r"<text[^>]*>([^<]*)</text>", drawn)
        assert words and words == re.findall(r"<text[^>]*>([^<]*)</text>", kept), "run `bash qa/regenerate.sh`"


def test_report_judges_the_newest_run(tmp_path):
    old = [row | {"date": "2026-11-20T00:00:00Z", "p50": "1000", "p80": "1000"} for row in good_rows()]
    write(tmp_path / "h200.csv", good_rows() + old)
    report = run(BENCHMARKS / "report.py", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    total = len(targets.TARGETS)
    assert f"{total} targets: 1 met, 1 short, {total - 2} not measured" in report.stdout
    assert "GB/s 4027, wanted >= 4100 (short by 1.8%)" in report.stdout
    assert "x torch compile" in report.stdout and "0.990" in report.stdout


def fp8_rows(op, shape, ratio, **columns):
    """A step in FP8 and its own bf16."""
    base = good_rows()[0] | {"case": "18", "op": op, "dtype": "fp8", "shape": shape, "direction": "forward+backward"}
    base |= {"p20": "100", "p50": "100", "p80": "100", "peer": "own bf16", "ratio": str(ratio)} | columns
    peer = {key: str(ratio * 100) for key in ("p20", "p50", "p80")}
    return [base, base | peer | {"impl": "own bf16", "peer": "", "ratio": ""}]


def test_fp8_slower_than_bf16_is_short_whatever_its_target_is(tmp_path):
    low = [t for t in targets.TARGETS if t.dtype == "fp8" and t.measure == "x own bf16" and t.bound < 0.98]
    own = {(t.op, t.shape) for t in targets.TARGETS}
    assert low and ("fresh_fp8", "1x2") not in own
    content = [row | {"case": low[0].case, "op": low[0].op, "shape": low[0].shape} for row in fp8_rows("", "", 0.99)]
    content += fp8_rows("fresh_fp8", "1x2", 0.5) + fp8_rows("fast_fp8", "1x2", 1.5)
    write(tmp_path / f"{low[0].device}.csv", content)
    report = run(BENCHMARKS / "report.py", "--results", tmp_path)
    assert report.returncode == 0, report.stderr
    assert "1 met, 2 short" in report.stdout
    assert re.search(rf"{low[0].op} .* x own bf16 0\.990, .*slower than bf16 by 1\.0%", report.stdout)
    assert re.search(r"fresh_fp8 .* x own bf16 0\.500, .*slower than bf16 by 100\.0%", report.stdout)
    page = run(BENCHMARKS / "report.py", "--results", tmp_path, "--markdown").stdout
    assert page.count("(short, slower than bf16)") == 2


def test_a_sustained_row_is_judged_before_newer_bursts(tmp_path):
    content = fp8_rows("fresh_fp8", "1x2", 1.5, timing="sustained")
    content += fp8_rows("fresh_fp8", "1x2", 0.5, timing="burst", date="2026-11-22T00:00:00Z")
    write(tmp_path / "h200.csv", content)
    assert "1 met, 0 short" in run(BENCHMARKS / "report.py", "--results", tmp_path).stdout


def test_merge_appends_once_and_refuses_faulty_rows(tmp_path):
    results, foreign = tmp_path / "results", tmp_path / "h200.csv"
    write(foreign, good_rows())
    for _ in range(2):
        assert run(BENCHMARKS / "report.py", "--results", results, "--merge", foreign).returncode == 0
    assert rows.load(results / "h200.csv") == good_rows()
    write(foreign, [good_rows()[0] | {"ratio": "2"}])
    assert run(BENCHMARKS / "report.py", "--results", results, "--merge", foreign).returncode == 0  # its peer is absent
    write(foreign, [good_rows()[0] | {"p50": "inf"}])
    refused = run(BENCHMARKS / "report.py", "--results", results, "--merge", foreign)
    assert refused.returncode != 0 and "p50 is 'inf'" in refused.stderr
    assert len(rows.load(results / "h200.csv")) == len(good_rows()) + 1


def test_contenders_take_turns_and_inputs_rotate():
    calls = []
    samplers = {name: lambda name=name: calls.append(name) or len(calls) for name in ("ours", "peer")}
    assert timing.interleave(samplers, 3) == {"ours": [1, 4, 5], "peer": [2, 3, 6]}
    outputs = []

    def run(x):
        outputs.append(weakref.ref(made := {x}))
        return made

    turns = timing.Turns(run, [(0,), (1,), (2,)])
    turns(2)
    turns(3)  # goes on where the last batch stopped, and one turn of outputs stays alive
    assert [ref() for ref in outputs] == [None, None, {2}, {0}, {1}]
    alone = timing.Turns(run, [(7,)])
    alone(2)
    assert [ref() for ref in outputs[5:]] == [None, None]


HARNESS = """
import sys
sys.path.insert(0, {folder!r})
import torch
import torch.nn.functional as F
from common import Bench, Case, keeps_mib, training_step
bench = Bench("harness", device="cpu")
case = Case("5", "rmsnorm", "fp32", (4, 8), "forward", bytes=8 * 32)
seen = []
def ours(x):
    seen.append(torch.is_grad_enabled())
    return F.rms_norm(x, (8,))
times = bench.compare(case, {{"ours": ours, "torch eager": lambda x: F.rms_norm(x, (8,)),
                              "broken": lambda x: 1 / 0}}, lambda: (bench.randn(4, 8, dtype="fp32"),))
assert list(times) == ["ours", "torch eager", "copy_"] and not any(seen)
net = torch.nn.Sequential(torch.nn.Linear(64, 64, bias=False), torch.nn.ReLU(), torch.nn.Linear(64, 64, bias=False))
x = bench.randn(16, 64, dtype="fp32", grad=True)
training_step(net)(x, torch.ones(16, 64))
assert x.grad is not None
product = Case("11", "product", "fp32", (16, 64, 64), "forward", flops=2 * 16 * 64 * 64)
bench.compare(product, {{"ours": net}}, lambda: (torch.randn(16, 64),))
used = set()
def spoils(x):
    used.add(x.sum().item())
    x.fill_(7.0)
def fresh(x):
    x.normal_()
bench.compare(case, {{"ours": spoils}}, lambda: (torch.randn(4, 8),), prepare=fresh)
assert len(used) >= 5 and 7.0 * 32 not in used
bench.record(Case("14", "mlp", "fp32", (16, 64), "keeps"), {{"ours": keeps_mib(net, x)}}, "MiB")
bench.finish()
"""


@pytest.mark.slow
def test_harness_writes_rows_that_hold(tmp_path):
    script = tmp_path / "bench_harness.py"
    script.write_text(HARNESS.format(folder=str(BENCHMARKS)))
    env = os.environ | {"TE_COMMIT": "abc1234"}
    done = run_script(script, "--device", "cpu", "--results", tmp_path, env=env)
    assert done.returncode == 1 and "broken: 5 rmsnorm fp32 4x8 forward" in done.stderr, done.stderr
    content = rows.load(tmp_path / "cpu.csv")
    assert rows.faults(content) == []
    assert [(row["impl"], row["peer"]) for row in content[:2]] == [("ours", "torch eager"), ("ours", "copy_")]
    assert {row["commit"] for row in content} == {"abc1234"}
    assert {(row["op"], row["timing"]) for row in content if row["impl"] == "ours"} == {
        ("rmsnorm", "wall"), ("product", "sustained"), ("rmsnorm", "prepared"), ("mlp", ""),
    }  # fmt: skip
    assert {row["sm_mhz"] + row["watts"] for row in content} == {""}
    kept = content[-1]  # the ReLU's output: 16 x 64 floats, saved twice and counted once; x and the weights are not
    assert (kept["unit"], float(kept["p50"]) * 2**20) == ("MiB", pytest.approx(16 * 64 * 4, rel=1e-5))


def test_a_run_without_a_commit_is_refused(tmp_path):
    (tmp_path / "rows.py").write_text((BENCHMARKS / "rows.py").read_text())
    done = run("-c", "import sys; sys.path.insert(0, sys.argv[1]); import rows; rows.commit()", tmp_path)
    assert done.returncode != 0 and "set TE_COMMIT" in done.stderr


def test_head_is_slower_where_it_is_above_base_by_more_than_bases_spread(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(BENCHMARKS)  # as where it runs
    judge = load("alternate").judge
    assert judge([10.0, 11.0, 12.0], [12.0, 13.0, 40.0]) == (11.0, 13.0, 2.0, 13.0 / 11.0, False)
    assert judge([10.0, 11.0, 12.0], [12.0, 13.1, 14.0])[-1]
    assert not judge([10.0, 11.0, 12.0], [1.0, 2.0, 3.0])[-1]
    refused = run(BENCHMARKS / "alternate.py", "--base", tmp_path, "bench_host.py", PYTHONPATH=str(BENCHMARKS))
    assert refused.returncode == 2 and "transformer_engine/__init__.py" in refused.stderr


def test_scripts_use_what_a_bench_has():
    """Most scripts run on a GPU alone, so that a name that was renamed in common.py is found here first."""
    sources = {path: path.read_text() for path in sorted(BENCHMARKS.glob("*.py"))}
    known = set()
    for text in sources.values():
        known |= {name for names in re.findall(r"\b(self\.\w+(?:, self\.\w+)*) = ", text) for name in names.split(", ")}
        known |= {f"self.{name}" for name in re.findall(r"^    def (\w+)\(self", text, re.M)}
    used = {(path.name, name) for path, text in sources.items() for name in re.findall(r"\bbench\.(\w+)", text)}
    used = {(file, name) for file, name in used if not (BENCHMARKS / f"{name}.py").exists()}
    assert len(used) > 100
    assert not {(file, name) for file, name in used if f"self.{name}" not in known}


class StubEvent:
    """Stands for a CUDA event; the stub GPU moves the clock."""

    clock_ms, queries = 0.0, 0

    def __init__(self, enable_timing=False):
        assert enable_timing

    def record(self):
        self.at = StubEvent.clock_ms

    def query(self):
        StubEvent.queries += 1
        return StubEvent.queries % 3 == 0

    def elapsed_time(self, stop):
        return stop.at - self.at


def test_a_sustained_sample_lasts_a_tenth_of_a_second_and_reads_clock_and_power(monkeypatch):
    """On a stub of a GPU whose calls last 0.5 ms."""
    calls = []

    def run(x):
        calls.append(x)
        StubEvent.clock_ms += 0.5

    class Gauge:
        def read(self):
            return 1500.0 + len(calls), 650.0

    monkeypatch.setattr(timing.torch.cuda, "Event", StubEvent)
    for name in ("synchronize", "_sleep"):
        monkeypatch.setattr(timing.torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(timing, "WARM_S", 0.0)
    sampler = timing.Sustained(run, [(0,), (1,)], Gauge())
    before = len(calls)
    assert sampler() == pytest.approx(500.0)
    assert len(calls) - before == 200 and sorted(calls[-2:]) == [0, 1]
    assert sampler.readings == [(1500.0 + len(calls), 650.0)] * 2
    burst = timing.cuda_sampler(run, [(0,)], Gauge())
    before = len(calls)
    assert burst() == pytest.approx(500.0) and len(calls) - before == 2
    assert burst.readings == [(1500.0 + len(calls), 650.0)]


def test_no_gauge_without_a_gpu():
    nvml = load("nvml")
    assert nvml.Gauge(timing.torch.device("cpu")).read() is None


@pytest.mark.slow
@pytest.mark.parametrize(
    "script, only",
    [
        ("bench_linear.py", "fp8"),
        ("bench_mlp.py", "fp8"),
        ("bench_transformer.py", "fp8,deterministic"),
        ("bench_grouped_linear.py", "fp8"),
        ("bench_gemm_fp8.py", "grad"),
    ],
)
def test_new_rows_run_on_a_cpu(script, only, tmp_path):
    options = ("--device", "cpu", "--samples", "1", "--only", only, "--results", tmp_path)
    done = run_script(BENCHMARKS / script, *options, env=os.environ | {"TE_COMMIT": "abc1234"})
    assert done.returncode == 0, done.stderr
    content = rows.load(tmp_path / "cpu.csv")
    assert rows.faults(content) == [] and {row["timing"] for row in content} <= {"sustained", ""}
    cached = {row["op"] for row in content if "_cached" in row["op"]}
    assert script == "bench_gemm_fp8.py" or {op.rpartition("_")[0] for op in cached} <= {row["op"] for row in content}
    assert bool(cached) == (script != "bench_gemm_fp8.py")
