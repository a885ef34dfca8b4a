#!/usr/bin/env python3
"""te.MoEMLP in ranges of experts, and in memory of a fixed size. It shows that the outputs and gradients of disjoint
ranges add up to those of the whole layer, and that a capacity changes no bit while all rows fit. Then a router sends
too many rows to one range: they are cut and counted, and the optimizer skips the step, without a wait of the host.

    python examples/moe_capacity.py                       # on this machine's device
    python examples/moe_capacity.py --experts 64 --ranges 8 --capacity 1.5
    python examples/moe_capacity.py --device cpu --tokens 256
"""

import argparse
import math

import torch

import transformer_engine.pytorch as te
from transformer_engine.pytorch.optimizers import FusedAdam
from transformer_engine.pytorch.verdict import watch

BF16 = torch.bfloat16
# Sums over ranges round each part, and their total, once to bfloat16 (2^-9), beside the sum over a token's experts.
BOUND = 8 * 2.0**-9


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    cuda = torch.cuda.is_available()
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda" if cuda else "cpu")
    parser.add_argument("--tokens", type=int, default=8192 if cuda else 512)
    parser.add_argument("--hidden", type=int, default=2048 if cuda else 128)
    parser.add_argument("--ffn", type=int, default=768 if cuda else 96, help="hidden units of an expert")
    parser.add_argument("--experts", type=int, default=32 if cuda else 16)
    parser.add_argument("--k", type=int, default=4 if cuda else 2, help="experts of a token")
    parser.add_argument("--ranges", type=int, default=4, help="into which the experts are divided")
    parser.add_argument("--capacity", type=float, default=1.5, help="of a range, in rows of an even routing")
    args = parser.parse_args(argv)
    if args.ranges < 2 or args.experts % args.ranges or args.k > args.experts // args.ranges:
        parser.error("wanted --ranges from 2 on that divide --experts, and --k at most the experts of a range")
    if not 1 <= args.capacity < args.ranges:
        parser.error("wanted --capacity from 1 on, and below --ranges, from which on all rows fit")
    return args


class Demonstration:
    """One layer with all experts, and layers with its weights and a range of the experts."""

    def __init__(self, args: argparse.Namespace) -> None:
        torch.manual_seed(0)
        self.args, self.device, self.failed = args, torch.device(args.device), 0
        self.watch = watch(self.device)
        self.whole = self.layer(None)
        self.x, self.dy = (torch.randn(args.tokens, args.hidden, dtype=BF16, device=self.device) for _ in range(2))
        self.x[:, 0] = 1  # a feature by which a router can prefer experts

    def layer(self, experts: tuple[int, int] | None, capacity: float | None = None) -> te.MoEMLP:
        """With the weights of the whole layer, if it is there."""
        args = self.args
        made = te.MoEMLP(
            args.hidden,
            args.ffn,
            args.experts,
            args.k,
            experts=experts,
            capacity_factor=capacity,
            params_dtype=BF16,
            device=self.device,
        )
        if experts is not None:
            state = self.whole.state_dict()
            state |= {name: state[name][slice(*experts)] for name in ("experts.fc1.weight", "experts.fc2.weight")}
            made.load_state_dict(state)
        return made

    def check(self, what: str, holds: bool) -> None:
        self.failed += not holds
        print(f"{'  ' if holds else 'WRONG: '}{what}", flush=True)

    def step(self, layer: te.MoEMLP) -> tuple[torch.Tensor, torch.Tensor]:
        """y and x's gradient; those of the parameters are in .grad."""
        leaf = self.x.clone().requires_grad_()
        layer.zero_grad()
        y, _ = layer(leaf)
        y.backward(self.dy)
        return y.detach(), leaf.grad

    # ---- what is shown ----

    def ranges(self) -> None:
        count = self.args.experts // self.args.ranges
        bounds = [(i * count, (i + 1) * count) for i in range(self.args.ranges)]
        want = self.step(self.whole)
        layers = [self.layer(experts) for experts in bounds]
        parts = [self.step(layer) for layer in layers]
        print(f"{self.args.experts} experts in {self.args.ranges} ranges, {self.args.tokens} tokens of {self.args.k}:")
        for name, exact, *found in zip(("outputs", "gradients of the input"), want, *parts, strict=True):
            total = sum(part.float() for part in found)
            error = ((total - exact.float()).norm() / exact.float().norm()).item()
            self.check(f"the ranges' {name} add up, relative error {error:.1e}", error <= BOUND)
        same = [
            torch.equal(self.grad(layer, name, i), self.grad(self.whole, name, experts[0] + i))
            for layer, experts in zip(layers, bounds, strict=True)
            for name in ("fc1", "fc2")
            for i in range(count)
        ]
        self.check(
            f"{sum(same)} of {len(same)} gradients of weights have the bits of those of the whole layer", all(same)
        )

    @staticmethod
    def grad(layer: te.MoEMLP, name: str, i: int) -> torch.Tensor:
        return getattr(layer.experts, name).weight.grad[i]

    def capacity(self) -> te.MoEMLP:
        experts = (0, self.args.experts // self.args.ranges)
        bounded, free = self.layer(experts, self.args.capacity), self.layer(experts)
        self.watch.reset()
        got, want = self.step(bounded), self.step(free)
        even = self.even_rows()
        print(
            f"experts {experts} of {self.args.experts}: {even:.0f} rows if all experts get as many, "
            f"{self.rows_here(bounded)} in this step, memory for {self.args.capacity} times the even number"
        )
        self.check("with a capacity: the same bits as with memory for all", all(map(torch.equal, got, want)))
        verdict = self.watch.verdict(wait=True)
        self.check(f"nothing was cut: {verdict}", verdict.ok and not self.watch.gate())
        return bounded

    def even_rows(self) -> float:
        return self.args.tokens * self.args.k / self.args.ranges

    def rows_here(self, layer: te.MoEMLP) -> int:
        """That the router of the last step sent to the layer's experts."""
        return int(layer.tokens_per_expert[layer.first_expert : layer.last_expert].sum())

    def overflow(self, layer: te.MoEMLP) -> None:
        """A router that sends every token to experts of one range."""
        optimizer = (
            FusedAdam(layer.parameters(), lr=1e-3, capturable=True, master_weights=True)
            if self.device.type == "cuda"
            else torch.optim.AdamW(layer.parameters(), lr=1e-3, fused=True)
        )
        self.train(layer, optimizer)  # makes the optimizer's states
        with torch.no_grad():
            layer.router.weight[: self.args.k, 0] += 64
        before = self.state(layer, optimizer)
        self.train(layer, optimizer)
        verdict, wanted = self.watch.verdict(wait=True), self.rows_here(layer)
        enough = math.ceil(100 * verdict.capacity_factor) / 100
        print(f"every token goes to experts 0 to {self.args.k - 1}: {wanted} rows")
        self.check(f"rows were cut and counted: {verdict}", 0 < verdict.cut < wanted)
        unchanged = all(map(torch.equal, before, self.state(layer, optimizer)))
        self.check("the gate is up: weights and the optimizer's states are as they were", unchanged)
        layer.capacity_factor = enough
        self.train(layer, optimizer)
        changed = not all(map(torch.equal, before, self.state(layer, optimizer)))
        self.check(
            f"with capacity_factor={enough} nothing is cut, and the step is done",
            changed and self.watch.verdict(wait=True).ok,
        )

    def train(self, layer: te.MoEMLP, optimizer: torch.optim.Optimizer) -> None:
        """One step, which a CUDA graph could capture: the gate stays on the device."""
        self.watch.reset()
        self.step(layer)
        optimizer.found_inf = self.watch.gate()
        optimizer.step()

    def state(self, layer: te.MoEMLP, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
        """Copies of the weights and of the optimizer's states."""
        kept = [value for state in optimizer.state.values() for value in state.values()]
        return [t.detach().clone() for t in [*layer.parameters(), *kept] if isinstance(t, torch.Tensor)]


def main(argv: list[str] | None = None) -> int:
    show = Demonstration(parse(argv))
    show.ranges()
    show.overflow(show.capacity())
    return 1 if show.failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
