"""The rows of benchmarks/results/<device>.csv: columns, place of measurement, reading and appending.

Refuses to write a row that does not name the commit it measured. Needs no torch to read rows.
timing: how each time was sampled (timing.py); sm_mhz, watts: medians of the GPU's clock and power meanwhile. They are
empty for counts, without a GPU's readings, and in rows of before these columns, which were bursts; a file without the
columns gets them when rows are added.
Environment: TE_COMMIT names that commit if there is no git checkout (a copied tree on another machine); it takes
precedence over git."""

import csv
import datetime
import math
import os
import pathlib
import platform
import re
import subprocess

HEADER_LINE = (
    "case,op,impl,dtype,shape,direction,p20,p50,p80,unit,bytes_or_flops,peer,ratio,gpu,driver,cuda,torch,commit,date,"
    "timing,sm_mhz,watts"
)
HEADER = HEADER_LINE.split(",")
OLD_HEADER = HEADER[:-3]
DTYPES = ("fp32", "fp16", "bf16", "fp8")
DIRECTIONS = ("forward", "backward", "forward+backward", "step", "keeps")
UNITS = ("us", "MiB", "nats")
TIMINGS = ("", "burst", "sustained", "prepared", "wall", "host")
KNOWN = (("dtype", DTYPES), ("direction", DIRECTIONS), ("unit", UNITS), ("timing", TIMINGS))
OPTIONAL = ("peer", "ratio", "timing", "sm_mhz", "watts")
NUMBERS = ("p20", "p50", "p80", "bytes_or_flops")
RUN = ("case", "op", "dtype", "shape", "direction", "gpu", "commit", "date")  # the columns that rows of one run share
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
        return "cpu", {"gpu": name, "driver": "none", "cuda": "none", "torch": torch.__version__, "commit": commit()}
    name = torch.cuda.get_device_name(device)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    known = re.search(r"[AHB]\d{3}", name)
    stem = known.group(0).lower() if known else re.sub(r"\W+", "_", name.lower())
    return stem, {
        "gpu": name,
        "driver": driver,
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "commit": commit(),
    }


def now():
    return datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ")


def number(value):
    """Six significant digits, and no exponent from a million up: what a reader and a spreadsheet both take."""
    if not math.isfinite(value):
        raise ValueError(f"benchmarks: a measured figure is {value}; wanted a finite number")
    return f"{value:.6g}" if abs(value) < 1e6 else f"{value:.0f}"


def append(path, rows):
    """Adds rows (dicts with exactly the header's keys) to the file, which it creates if necessary."""
    path.parent.mkdir(parents=True, exist_ok=True)
    there = _read(path) if path.exists() else (None, [])
    new = there[0] != HEADER
    with path.open("w" if new else "a", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        if new:
            writer.writeheader()
            writer.writerows(there[1])
        writer.writerows(rows)


def _read(path):
    """(the header, the rows with the keys of today's)"""
    with pathlib.Path(path).open(newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames not in (HEADER, OLD_HEADER):
            raise ValueError(f"{path}: header is {reader.fieldnames}; wanted {HEADER}")
        return reader.fieldnames, [{key: row.get(key, "") for key in HEADER} for row in reader]


def load(path):
    """The rows of one file, as dicts of strings, in file order."""
    return _read(path)[1]


def rate(row):
    """GB/s of a row whose bytes_or_flops are bytes and whose unit is us; divide by 1e3 for TFLOP/s of flops."""
    return float(row["bytes_or_flops"]) / float(row["p50"]) / 1e3


def faults(rows):
    """The faults of loaded rows, as sentences; empty if every row is well formed and every ratio adds up."""
    found, medians = [], {}
    for row in rows:
        name = " ".join(row[key] for key in (*RUN, "impl"))
        found += [
            f"{name}: {key} is {row[key]!r}; wanted one of {known}" for key, known in KNOWN if row[key] not in known
        ]
        found += [f"{name}: {key} is empty" for key in HEADER if not row[key] and key not in OPTIONAL]
        figures = [key for key in NUMBERS if not _positive(row[key])]
        figures += [key for key in ("sm_mhz", "watts") if row[key] and not _positive(row[key])]
        found += [f"{name}: {key} is {row[key]!r}; wanted a finite number above 0" for key in figures]
        if not figures and not float(row["p20"]) <= float(row["p50"]) <= float(row["p80"]):
            found.append(f"{name}: p20 <= p50 <= p80 does not hold")
        medians[_run_and_timing(row), row["impl"]] = row["p50"]
        if bool(row["peer"]) != bool(row["ratio"]) or (row["peer"] and row["impl"] != "ours"):
            found.append(f"{name}: peer is {row['peer']!r}, ratio {row['ratio']!r}; wanted both on a row of ours")
    for row in rows if not found else []:
        peer = medians.get((_run_and_timing(row), row["peer"]))
        if peer and abs(float(peer) / float(row["p50"]) / float(row["ratio"]) - 1) > 1e-4:  # six digits are written
            found.append(f"{' '.join(row[key] for key in RUN)}: ratio {row['ratio']} is not {peer} / {row['p50']}")
    return found


def _run_and_timing(row):
    """A case may be timed in two ways within the second of `date`."""
    return tuple(row[key] for key in (*RUN, "timing"))


def _positive(text):
    try:
        return 0 < float(text) < math.inf
    except ValueError:
        return False
