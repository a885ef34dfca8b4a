"""Prints every case beside its target, and the cases that miss it; uses the newest row of each case and runs nothing.
A row that was timed sustained is preferred to bursts. FP8 that is slower than its own bf16 is short, whatever its
target is, and without a target too.

python benchmarks/report.py                  the table of all targets, then the missed ones
python benchmarks/report.py --markdown       docs/reference/results.md: the measured ones as a table
python benchmarks/report.py --merge FILE...  first adds the rows that another machine wrote (h200.csv, ...)"""

import argparse
import dataclasses
import pathlib
import sys

import rows as table
from targets import OWN, TARGETS, Target

WIDTHS = (4, 33, 5, 18, 17, 36, 11, 11, 13, 10)


def measured(target, rows):
    """(value, newest row) of a target among one device's rows; None if no row has the measure."""
    keys = ("case", "op", "dtype", "shape", "direction")
    own = [row for row in rows if row["impl"] == "ours" and all(row[key] == getattr(target, key) for key in keys)]
    peer = target.measure.removeprefix("x ") if target.measure.startswith("x ") else None
    if peer:
        own = [row for row in own if row["peer"] == peer]
    if not own:
        return None
    row = max(own, key=lambda row: (row["timing"] == "sustained", row["date"]))
    if peer:
        return float(row["ratio"]), row
    if target.measure == "GB/s":
        return table.rate(row), row
    if target.measure == "TFLOP/s":
        return table.rate(row) / 1e3, row
    if row["unit"] != target.measure:
        raise ValueError(f"{row}: unit is {row['unit']}; its target is in {target.measure}")
    return float(row["p50"]), row


def unbound(files):
    """A target for each case in FP8 that was measured beside its own bf16 and has none over it."""
    over = f"x {OWN}"
    bound = {dataclasses.replace(target, bound=1.0) for target in TARGETS if target.measure == over}
    found = {}
    for device, rows in files.items():
        for row in rows:
            if row["dtype"] == "fp8" and row["peer"] == OWN and row["unit"] == "us":
                keys = (row[key] for key in ("case", "op", "dtype", "shape", "direction"))
                found[Target(*keys, over, 1.0, device)] = None
    return [target for target in found if target not in bound]


def is_slower(target, value):
    """Whether the value is FP8's speed over its own bf16, and below 1."""
    return target.dtype == "fp8" and target.measure == f"x {OWN}" and target.direction != "keeps" and value < 1


def judge(results):
    """One line per target: (target, value or None, row or None, verdict)."""
    files = {path.stem: table.load(path) for path in sorted(results.glob("*.csv"))}
    lines = []
    for target in [*TARGETS, *unbound(files)]:
        found = measured(target, files.get(target.device, []))
        if found is None:
            lines.append((target, None, None, "not measured"))
            continue
        value, row = found
        short = abs(value / target.bound - 1)
        verdict = "met" if target.met(value) else f"short by {100 * short:.1f}%"
        if is_slower(target, value):
            verdict = f"short, slower than bf16 by {100 * (1 / value - 1):.1f}%"
        lines.append((target, value, row, verdict))
    return lines


def show(value, measure):
    return f"{value:.3f}" if measure.startswith("x ") else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def bound(target):
    return ("<= " if target.met(-1e30) else ">= ") + show(target.bound, target.measure)


def print_table(lines):
    head = ("case", "op", "dtype", "shape", "direction", "measure", "target", "measured", "verdict", "device")
    print("  ".join(text.ljust(width) for text, width in zip(head, WIDTHS, strict=True)).rstrip())
    for target, value, row, verdict in lines:
        cells = (target.case, target.op, target.dtype, target.shape, target.direction, target.measure, bound(target))
        cells += ("-" if value is None else show(value, target.measure), verdict, target.device)
        where = f"  {row['commit']} {row['date']}" if row else ""
        print("  ".join(text.ljust(width) for text, width in zip(cells, WIDTHS, strict=True)).rstrip() + where)


def print_shortfalls(lines):
    short = [line for line in lines if line[3].startswith("short")]
    missing = sum(line[1] is None for line in lines)
    print(
        f"\n{len(lines)} targets: {len(lines) - missing - len(short)} met, {len(short)} short, {missing} not measured"
    )
    for target, value, _, verdict in short:
        name = f"case {target.case} {target.op} {target.dtype} {target.shape} {target.direction} on {target.device}"
        got = f"{target.measure} {show(value, target.measure)}, wanted {bound(target)}"
        print(f"  {name}: {got} ({verdict})")


HEAD = """# Every target that was measured

This text is generated: `python benchmarks/report.py --markdown > docs/reference/results.md`. `benchmarks/targets.py`
defines the case numbers, the work and the targets. A speed "over" a peer is the peer's time over ours: medians, both
timed in one process and interleaved. Each line is the newest row of its case in `benchmarks/results/`.
[Performance](performance.md) explains what falls short.
"""


def print_markdown(lines):
    print(HEAD)
    print("| case | work | device | measure | target | measured |\n|---|---|---|---|---|---|")
    for target, value, row, verdict in lines:
        if row:
            work = f"{target.op} {target.dtype} {target.shape} {target.direction}"
            over = "memory, times less than " if target.direction == "keeps" else "speed over "
            measure = target.measure.replace("x ", over)
            got = show(value, target.measure)
            got = got if verdict == "met" else f"**{got}** ({verdict.partition(' by ')[0]})"
            print(f"| {target.case} | {work} | {row['gpu']} | {measure} | {bound(target)} | {got} |")


def merge(files, results):
    """Appends the rows of each file to its namesake in `results`; rows already there are not added twice."""
    for path in files:
        new, home = table.load(path), results / path.name
        faults = table.faults(new)
        if faults:
            sys.exit(f"{path}: not merged\n  " + "\n  ".join(faults))
        known = {tuple(row.values()) for row in table.load(home)} if home.exists() else set()
        added = [row for row in new if tuple(row.values()) not in known]
        table.append(home, added)
        print(f"{home}: {len(added)} rows added, {len(new) - len(added)} already there")


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--markdown", action="store_true", help="print docs/reference/results.md")
    parser.add_argument("--merge", nargs="+", type=pathlib.Path, default=[], metavar="FILE")
    parser.add_argument("--results", type=pathlib.Path, default=table.RESULTS, help="folder of the rows")
    args = parser.parse_args()
    merge(args.merge, args.results)
    lines = judge(args.results)
    if args.markdown:
        print_markdown(lines)
        return
    print_table(lines)
    print_shortfalls(lines)


if __name__ == "__main__":
    main()
