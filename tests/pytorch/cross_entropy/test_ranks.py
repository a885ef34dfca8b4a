"""Cross entropy whose classes are divided over ranks, of logits and fused, on 2 and 4: every rank's loss and shards
against a float64 oracle of the whole, beside a column-parallel Linear, compiled, and what is refused on every rank
alike."""

import pytest
import torch
import torch.nn.functional as F
from ranks import at_most, on_ranks
from support import UNIT_ROUNDOFF, assert_same_bits, assert_within, wide

from . import workers
from .workers import CLASSES, DTYPES, OPTIONS, TOKENS, targets_of, whole

pytestmark = pytest.mark.dist
both = pytest.mark.parametrize("ranks", [2, 4])


def oracle(leaves, logits_of, target, options):
    leaves = [wide(t).requires_grad_() for t in leaves]
    rows = logits_of(*leaves).reshape(-1, CLASSES)
    how = "mean" if options["reduce_loss"] else "none"
    loss = F.cross_entropy(
        rows,
        targets_of(target, options).cpu().reshape(-1),
        ignore_index=options["ignore_idx"],
        label_smoothing=options["label_smoothing"],
        reduction=how,
    )
    loss = loss if options["reduce_loss"] else loss.view(TOKENS)
    given = torch.linspace(0.5, 1.5, max(1, loss.numel())).view(loss.shape)
    return loss, torch.autograd.grad(loss, leaves, given.double())


@both
def test_shards(ranks):
    """A row's arithmetic in float32, of 64 classes within 30 of each other: 1e-5; two roundings of the gradient."""
    results = on_ranks(workers.sharded, ranks=at_most(ranks))
    for dtype in DTYPES:
        logits, *_, target = whole(dtype)
        for number, options in enumerate(OPTIONS):
            if options["label_smoothing"]:
                logits = logits.clamp_min(-8)
            loss, (grad,) = oracle([logits], lambda x: x, target, options)
            for rank, result in enumerate(results):
                what = f"rank {rank}: {dtype}, options {number}"
                assert_within(result[dtype, number][0], loss, 1e-5 * (1 + loss.detach().abs()), what)
                own = grad.chunk(len(results), -1)[rank]
                bound = 1e-5 + 3 * UNIT_ROUNDOFF[dtype] * own.abs()
                assert_within(result[dtype, number][1], own, bound, what)
                assert_same_bits(result[dtype, number][0].view(-1), results[0][dtype, number][0].view(-1), what)


@both
def test_fused(ranks):
    """Logits of 16 products, rounded to the dtype: within 64 of its units, which bounds the error of p and so of all
    gradients, relative to sums of at most 24 tokens' or 64 classes' magnitudes, of at most 4 each."""
    results = on_ranks(workers.fused, ranks=at_most(ranks))
    for dtype in DTYPES:
        _, *leaves, target = whole(dtype)
        for number, options in enumerate(OPTIONS):
            loss, grads = oracle(leaves, F.linear, target, options)
            unit = 64 * UNIT_ROUNDOFF[dtype] + 1e-5
            for rank, result in enumerate(results):
                what = f"rank {rank}: {dtype}, options {number}"
                got = result[dtype, number]
                assert_within(got[0], loss, unit * (1 + loss.detach().abs()), what)
                shard = [grads[0], *(g.chunk(len(results))[rank] for g in grads[1:])]
                for name, g, want in zip(("hidden", "weight", "bias"), got[1:], shard):
                    assert_within(g, want, unit * (1 + want.abs().max()), f"{what}: gradient of {name}")


def test_beside_a_column_parallel_linear():
    """Its values, with sequence parallelism too; and compiled, its own bits."""
    results = on_ranks(workers.composed)
    for rank, result in enumerate(results):
        for sequence in (False, True):
            names = ("loss", "hidden", "weight")
            for got, want, name in zip(result["fused", sequence], result["linear", sequence], names):
                assert_within(got, want, 1e-6, f"rank {rank}, sequence {sequence}: {name}")
        for got, want in zip(result["compiled"], result["eager"]):
            assert_same_bits(got.view(-1), want.view(-1), f"rank {rank}: compiled")


def test_refusals():
    results = on_ranks(workers.refusals, device="cpu")
    words = {
        "uneven": ("ValueError", "call different things", "rank 0 passes Float [4, 33]", "rank 1 passes Float [4, 32]"),
        "out of range": ("ValueError", "target", "64 in row 2", "0 to 63"),
        "destroyed": ("RuntimeError", "parallel_cross_entropy", "dist_process_group", "destroyed"),
    }
    for name, wanted in words.items():
        for told in results:
            assert told[name] is not None and told[name] == results[0][name], name
            for word in wanted:
                assert word in " ".join(told[name]), told[name]
    assert results[1]["not in it"][0] == "ValueError" and "dist_process_group" in results[1]["not in it"][1]
