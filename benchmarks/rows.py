"""The rows of benchmarks/results/<device>.csv: their columns, where they were measured, reading and appending them.

Refuses to write a row that does not name the commit it measured. Needs no torch to read rows.
Environment: TE_COMMIT names that commit where there is no git checkout (a copied tree on another machine); it wins over
git where both are there."""

import csv
import datetime
import math
import os
import pathlib
import platform
import re
import subprocess

HEADER = (
    "case,op,impl,dtype,shape,direction,p20,p50,p80,unit,bytes_or_flops,peer,ratio,gpu,driver,cuda,torch,commit,date"
).split(",")
DTYPES = ("fp32", "fp16", "bf16", "fp8")
RESULTS = pathlib.Path(__file__).resolve().parent / "results"


def commit():
    """TE_COMMIT, or the short hash of HEAD, marked -dirty when tracked files other than results differ from it."""
    if os.environ.get("TE_COMMIT"):
        return os.environ["TE_COMMIT"]
    git = ["git", "-C", str(RESULTS.parent)]
    try:
        head = subprocess.run([*git, "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=True)
        clean = [
            "status",
            "--porcelain",
            "--untracked-files=no",
            "--",
            ".",
            ":(top)",
            ":(top,exclude)benchmarks/results",
        ]
        changes = subprocess.run([*git, *clean], capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise RuntimeError("benchmarks: no git checkout names the measured commit; set TE_COMMIT to it") from error
    return head.stdout.strip() + ("-dirty" if changes else "")


def _cpu_name():
    try:
        names = re.findall(r"^model name\s*:\s*(.+)$", pathlib.Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        names = []
    return names[0].strip() if names else platform.processor() or platform.machine()


def machine(device):
    """(file stem, {gpu, driver, cuda, torch, commit}) of a torch.device; a CPU's `gpu` is its name and threads."""
    import torch

    if device.type != "cuda":
        name = f"{_cpu_name()} ({torch.get_num_threads()} threads)"
        return "cpu", dict(gpu=name, driver="none", cuda="none", torch=torch.__version__, commit=commit())
    name = torch.cuda.get_device_name(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    known = re.search(r"[AHB]\d{3}", name)
    stem = known.group(0).lower() if known else re.sub(r"\W+", "_", name.lower())
    return stem, dict(gpu=name, driver=driver, cuda=torch.version.cuda, torch=torch.__version__, commit=commit())


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value):
    """Six significant digits, never in exponent form below 1e15: what a reader and a spreadsheet both take."""
    if not math.isfinite(value):
        raise ValueError(f"benchmarks: a measured figure is {value}; wanted a finite number")
    return f"{value:.6g}" if 1e-4 <= abs(value) < 1e6 else f"{value:.0f}"


def append(path, rows):
    """Adds rows (dicts with exactly the header's keys) to the file, which it makes when it is not there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = not path.exists()
    with path.open("a", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        if new:
            writer.writeheader()
        writer.writerows(rows)


def load(path):
    """The rows of one file, as dicts of strings, in file order."""
    with pathlib.Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != HEADER:
            raise ValueError(f"{path}: header is {reader.fieldnames}; wanted {HEADER}")
        return list(reader)


def rate(row):
    """GB/s of a row whose bytes_or_flops are bytes and whose unit is us; divide by 1e3 for TFLOP/s of flops."""
    return float(row["bytes_or_flops"]) / float(row["p50"]) / 1e3
