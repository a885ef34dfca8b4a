#!/usr/bin/env python3
"""A stack of MoE blocks (te.MoEMLP) whose experts compute in buffers for the worst case, because CUDA graphs require
static shapes. The stash keeps the live rows for the backward in pages, with the same losses and gradients, bit for bit.
Some experts are elsewhere, so the number of rows varies from layer to layer and from step to step. It runs three
routings, eager and in one CUDA graph; too few device pages beside host pages; and a step that finds no room, changes
nothing, and is repeated.

    python examples/moe_stash.py                        # on this machine's device
    python examples/moe_stash.py --capacity 6 --layers 8
    python examples/moe_stash.py --device cpu --steps 2

Without a GPU nothing is captured. Writes <out>/occupancy.{svg,png,csv}.
"""

import argparse
import os
import sys
import time
import warnings
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS then repeats its bits
sys.path.insert(0, str(Path(__file__).resolve().parent))  # for `moe`, also under PYTHONSAFEPATH

import torch

import transformer_engine.pytorch as te
from extras import need
from moe.blocks import SKEWS, Config
from moe.memory import peak_bytes
from moe.run import Result, Run, batch
from transformer_engine.pytorch.stash import PagedStash, Verdict

MIB = 2**20


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--steps", type=int, default=3, help="of each routing")
    parser.add_argument("--layers", type=int, default=12 if cuda else 4)
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 2048)
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 128)
    parser.add_argument("--ffn", type=int, default=1024 if cuda else 128)
    parser.add_argument("--experts", type=int, default=64 if cuda else 16)
    parser.add_argument("--here", type=int, default=16 if cuda else 4, help="how many of them are computed here")
    parser.add_argument("--k", type=int, default=4 if cuda else 2, help="experts of a token")
    parser.add_argument("--capacity", type=float, default=3.0, help="of the buffers, in rows of a balanced routing")
    parser.add_argument("--page-bytes", type=int, default=524288 if cuda else 32768)
    parser.add_argument("--out", type=Path, default=Path("runs/moe_stash"))
    args = parser.parse_args(argv)
    if args.steps < 1 or args.layers < 2 or not args.here <= args.experts:
        parser.error("wanted --steps from 1 on, --layers from 2 on, and --here at most as many as --experts")
    return args


class Demonstration:
    """Runs the variants in turn; each starts from the same weights and is compared with the run without a stash."""

    def __init__(self, args: argparse.Namespace) -> None:
        names = ("layers", "tokens", "hidden", "ffn", "experts", "here", "k", "capacity")
        self.config = Config(**{name: getattr(args, name) for name in names})
        self.device, self.page_bytes, self.out = torch.device(args.device), args.page_bytes, args.out
        self.order = [(i * args.steps + j, skew) for i, skew in enumerate(SKEWS) for j in range(args.steps)]
        self.plain = Run(self.config, self.device)
        self.expected = [self.plain(*step) for step in self.order]
        self.failed = 0
        finite = all(bool(t.isfinite().all()) for result in self.expected for t in (result.loss, *result.grads))
        self.check(f"the run without: {len(self.order)} steps, all gradients finite", finite)

    def stash(self, **options) -> PagedStash:
        return PagedStash(self.page_bytes, device=self.device, **options)

    def check(self, what: str, holds: bool) -> None:
        self.failed += not holds
        print(f"{'  ' if holds else 'WRONG: '}{what}", flush=True)

    def compare(self, what: str, results: list[Result], first: int = 0) -> None:
        same = [a.equals(b) for a, b in zip(results, self.expected[first : first + len(results)], strict=True)]
        self.check(f"{what}: losses and gradients of {sum(same)} of {len(same)} steps are those without", all(same))

    # ---- what is shown ----

    def routings(self) -> PagedStash:
        """The first step keeps everything and is measured; a factor leaves room for worse routings."""
        config = self.config
        print(
            f"{config.layers} layers, {config.here} of {config.experts} experts here; {config.rows} rows of a buffer, "
            f"{config.balanced_rows} where all experts get as many; {config.row_bytes} bytes are kept of a row"
        )
        stash = self.stash(factor=self.room())
        run = Run(config, self.device, stash)
        results = []
        for number, (step, skew) in enumerate(self.order):
            start = time.perf_counter()
            results.append(run(step, skew))
            verdict = stash.verdict(wait=True)
            took = 1e3 * (time.perf_counter() - start)
            if number:
                self.report(f"step {number}, {skew}, {took:.0f} ms", verdict)
        self.compare("eager", results)
        if self.device.type == "cuda":
            self.captured(run, stash)
        else:
            print("  captured: not without CUDA")
        return stash

    def room(self) -> float:
        """The first, balanced step sizes the pool; the buffers hold at most `capacity` times that."""
        return min(self.config.capacity, self.config.rows / self.config.balanced_rows) * 1.1

    def report(self, what: str, verdict: Verdict | None) -> None:
        """The last layer's backward directly follows its forward, so nothing of it is copied."""
        if verdict is None:
            return self.check(f"{what}: nothing was stashed", False)
        r = verdict.report
        self.check(
            f"{what}: {r['groups']} groups, {r['live_bytes'] / MIB:.2f} MiB alive in {r['device_peak']} device pages "
            f"and {r['host_peak']} host pages, {r['spilled_bytes'] / MIB:.2f} MiB spilled, "
            f"{(r['taken_bytes'] - r['live_bytes']) / MIB:.2f} MiB waste",
            verdict.ok and r["groups"] == self.config.layers - 1 and r["live_bytes"] % self.config.row_bytes == 0,
        )

    def captured(self, run: Run, stash: PagedStash) -> None:
        """A graph that continues after the eager steps, compared with the plain run, which stays eager."""
        run.capture()
        last = len(self.order)
        more = [(last + i, skew) for i, skew in enumerate(SKEWS)]
        results, expected = [run(*step) for step in more], [self.plain(*step) for step in more]
        torch.cuda.synchronize(self.device)
        same = all(a.equals(b) for a, b in zip(results, expected, strict=True))
        self.check(f"captured: losses and gradients of {len(more)} replays are those of eager steps without", same)

    def memory(self, stash: PagedStash) -> None:
        """Peaks of a forward and backward with everything kept, with a stash, and with layers on the host."""
        layers, (x, target) = self.config.layers, batch(self.config, self.device, 0)
        exact = self.stash(factor=1.0)  # a pool of just the pages of this batch
        offload = te.get_cpu_offload_context(True, layers - 1, layers)
        runs = {
            "static": Run(self.config, self.device),
            "stashed": Run(self.config, self.device, exact),
            "offloaded": Run(self.config, self.device, around=offload),
        }
        peaks = {}
        for name, run in runs.items():
            run.gradients_stay = True
            run.compute(x, target)
            if run.stash is not None:
                run.stash.reset()
            peaks[name] = peak_bytes(lambda run=run: run.compute(x, target), self.device) / MIB
        plan, worst = exact.plan(), exact.plan(worst=True)
        pool = plan.device_pages * plan.page_bytes / MIB
        moved = offload[0].offload_synchronizer.get_offloaded_total_size_mb()
        print("memory of a step above its start, beside its gradients, MiB:")
        print(f"  static    {peaks['static']:8.1f}, of which the groups keep {plan.static_bytes / MIB:.1f}")
        print(
            f"  stashed   {peaks['stashed'] + pool:8.1f}, of which {pool:.1f} are the pool; at most "
            f"{peaks['static'] + (plan.stashed_bytes - plan.static_bytes) / MIB:.1f} were predicted; "
            f"{plan.live_bytes / MIB:.1f} are alive"
        )
        print(f"  offloaded {peaks['offloaded']:8.1f}; {moved:.1f} have left, with the rows that hold nothing")
        print(f"  a pool that can never overflow has {worst.peak_pages * worst.page_bytes / MIB:.1f}")
        exact.close()

    def shortage(self, stash: PagedStash) -> None:
        """A quarter of the device pages; the rest goes to the host."""
        plan, worst = stash.plan(), stash.plan(worst=True)
        short = self.stash(device_pages=max(1, plan.peak_pages // 4), host_pages=worst.peak_pages)
        run = Run(self.config, self.device, short)
        results, verdicts = [], []
        for step in self.order[:2]:
            results.append(run(*step))
            verdicts.append(short.verdict(wait=True))
        self.report(f"{short.device_pages} device pages", verdicts[-1])
        self.check("some of it was on the host", any(v is not None and v.report["spilled_bytes"] > 0 for v in verdicts))
        self.compare("through host pages", results)
        short.close()

    def overflow(self, stash: PagedStash) -> None:
        """No room: the step is bad, the gate makes the optimizer do nothing, the pool grows, and the step is
        repeated."""
        small = self.stash(device_pages=max(1, stash.plan().peak_pages // 2))
        run = Run(self.config, self.device, small)
        run.model.skew(self.order[0][1])
        x, target = batch(self.config, self.device, self.order[0][0])
        run.step(x, target)  # makes the optimizer's states, and skips
        before = run.state()
        run.step(x, target)
        verdict = small.verdict(wait=True)
        print(f"  {verdict}")
        unchanged = all(torch.equal(a, b) for a, b in zip(before, run.state(), strict=True))
        self.check(
            "too few pages: the gate is up, and weights and states are as they were", not verdict.ok and unchanged
        )
        run.model.zero_grad(set_to_none=True)
        pages = small.grow()

        def again() -> None:
            run.compute(x, target)
            run.update()

        small.rerun(again)
        self.check(f"grown to {pages} pages, and run again: it is good", small.verdict(wait=True).ok)
        self.compare("run again", [run.result()])
        small.close()

    def plot(self, stash: PagedStash) -> None:
        self.out.mkdir(parents=True, exist_ok=True)
        for name in ("occupancy.svg", "occupancy.png", "occupancy.csv"):
            stash.plot(self.out / name)
        print(f"wrote {self.out}/occupancy.svg, .png and .csv: pages in flight after each store and load")


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    need("matplotlib", "examples")  # before the work, not after it
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*stashing costs memory.*")  # it is printed
        show = Demonstration(args)
        stash = show.routings()
        show.memory(stash)
        show.shortage(stash)
        show.overflow(stash)
        show.plot(stash)
        last = stash.close()
    print(f"at the end: {last}")
    return 1 if show.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
