# Steps that go another way than the last one, that fail, or that turn out bad: an outcome with a name each, and the
# next step is whole.
import gc
import subprocess
import sys

import pytest
import torch
from support import in_threads, randn, refused

import transformer_engine.pytorch as te

from .cases import LIVE, ROWS, WIDTH, Whole, count, filled, given, layers_of, made, report, same, step


def test_another_order(device):
    with made(device) as stash:
        whole = Whole(stash, device)
        step(whole.module, [whole.x], [whole.counter], stash)
        whole()
        stash.reset()
        with refused(RuntimeError, "forward of group 2, microbatch 0", "entry 1", "wanted the forward of group 1"):
            names = [0, 2, 1]
            whole.module(whole.x.clone().requires_grad_(), whole.counter, stash, names)
        with pytest.warns(UserWarning, match="ended before the forward of group 1, microbatch 0, entry 1"):
            whole()
        y = whole.module(whole.x.clone().requires_grad_(), whole.counter, stash)
        with refused(RuntimeError, "backward of group 2, microbatch 1", "entry 6", "step is over", "record=True"):
            y.sum().backward()
        del y
        whole()
        stash.reset(record=True)
        step(whole.module, [whole.x] * 2, [whole.counter] * 2, stash)
        stash.reset()
        with refused(RuntimeError, "backward of group 2, microbatch 0", "entry 3", "wanted the forward of group 0"):
            step(whole.module, [whole.x], [whole.counter], stash)
        with pytest.warns(UserWarning, match="ended before the forward of group 0, microbatch 1"):
            stash.reset(record=True)
        step(whole.module, [whole.x], [whole.counter], stash)
        whole()


def test_bump_out_of_order(device):
    with made(device, policy="bump") as stash:
        whole = Whole(stash, device)
        step(whole.module, [whole.x] * 2, [whole.counter] * 2, stash, order="fifo")
        with refused(ValueError, "'policy'", "'bump'", "group 2, microbatch 0", "policy='ring'"):
            stash.reset()
        whole(record=True)
        with refused(ValueError, "'policy'", "'bump'"):
            stash.reset()
            stash.schedule_from_order([1, 1, -1, -1], 1)
        a = stash.stash("a", [whole.x], whole.counter)
        b = stash.stash("b", [whole.x], whole.counter)
        stash.reload(a)
        verdict = stash.verdict(wait=True)
        assert b and verdict.flags == ("out of order",) and "policy='ring'" in str(verdict)
        whole()


@pytest.mark.parametrize("device_pages", [None, 4096])
@pytest.mark.parametrize("scheduled", [True, False])
def test_a_first_step_that_fails(scheduled, device_pages, device):
    """It gives no schedule and no pool size; the next step is recorded."""
    with made(device, device_pages=device_pages, page_bytes=128) as stash:
        module, x, one = layers_of(device, 6, scheduled=scheduled), given(device), count(LIVE, device)
        expected, _ = step(module, [x], [one])
        with pytest.raises(ZeroDivisionError):
            z = x.clone().requires_grad_()
            for i, layer in enumerate(module.layers[:2]):
                z = stash.pre_schedule(z) if scheduled else z
                with stash.group(i, one):
                    z = layer(z)
                z = stash.post_schedule(z) if scheduled else z
            1 // 0  # noqa: B018
        for i in range(3):
            if i == 0 and scheduled:
                with pytest.warns(UserWarning, match="recorded ended before the backward of group 0"):
                    stash.reset()
            else:
                stash.reset()
            found, _ = step(module, [x], [one], stash)
            same(found, expected)
        numbers = report(stash)
        assert numbers["flags"] == 0 and numbers["groups"] == (5 if scheduled else 6)
        assert stash.plan().peak_pages == numbers["groups"] * 4  # of 448 bytes


@pytest.mark.parametrize("where", ["group", "backward", "behind pre", "no backward"])
def test_a_step_that_fails(where, device):
    with made(device, debug=True) as stash:
        whole = Whole(stash, device)
        whole(), whole()
        stash.reset()

        class Fails(torch.autograd.Function):
            @staticmethod
            def forward(ctx, t):
                return t * 1

            @staticmethod
            def backward(ctx, g):
                raise KeyError("no")

        def run():
            z = stash.pre_schedule(whole.x.clone().requires_grad_())
            if where == "behind pre":
                raise KeyError("no")
            for i, layer in enumerate(whole.module.layers):
                z = stash.pre_schedule(z) if i else z
                with stash.group(i, whole.counter):
                    z = layer(z)
                    if where == "group" and i == 1:
                        raise KeyError("no")
                    z = Fails.apply(z) if where == "backward" and i == 1 else z
                z = stash.post_schedule(z)
            if where != "no backward":
                z.sum().backward()

        if where == "no backward":
            run()
        else:
            with pytest.raises(KeyError, match="no"):
                run()
        gc.collect()
        assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None
        assert report(stash)["device_in_use"] == 0  # the graph was freed
        whole(), whole()


def test_a_captured_pool_and_grows(device):
    with made(device, device_pages=2) as stash:
        whole, t, recaptured = Whole(stash, device), filled(100, 64, torch.uint8, device), []
        with refused(RuntimeError, "PagedStash.grow", "0 pages", "the pool has 2"):
            stash.stash("fits", [t], count(0, device))
            stash.grow()
        stash.reset()
        assert stash.verdict().step == 0
        for turn in range(2):
            stash.stash("a", [t], count(len(t), device))
            assert stash.verdict(wait=True).flags == ("lost",)
            if turn == 0:
                stash._pool.captured = True  # as a reset() inside of a capture does
                with refused(RuntimeError, "PagedStash.grow", "captured", "recapture=fn"):
                    stash.grow()
                assert stash.grow(recapture=lambda: recaptured.append(1)) == 30 and recaptured == [1]
                t = filled(1000, 64, torch.uint8, device)
        stash.stash("c", [t], count(1000, device))
        stash.reset()
        verdict = stash.verdict()  # the new pool's first step, by that step's names
        assert verdict is not None and not verdict.ok and verdict.group == "a"
        stash.stash("d", [t], count(1000, device))
        assert stash.grow() > 250
        whole(record=True)


def test_memory_that_is_exhausted_under_raise_at_step_end(device):
    with made(device, device_pages=1, host_pages=1, overflow="raise_at_step_end", close=False) as stash:
        whole, t = Whole(stash, device), filled(100, 64, torch.uint8, device)
        stash.stash("a", [t], count(100, device))
        if device == "cuda":
            torch.cuda.synchronize()
        with refused(RuntimeError, "step 0 is bad", "'a'", "no room", "grow()", "rerun()"):
            stash.reset()
            torch.cuda.synchronize() if device == "cuda" else None
            stash.verdict().raise_if_bad()
        stash.stash("b", [t], count(100, device))
        with refused(RuntimeError, "'b'"):
            stash.close()
        with refused(RuntimeError, "is closed"):
            stash.reset()
        assert whole


def test_rerun(device):
    """A bad step runs again with the same random numbers and buffers, and its verdict is not raised twice."""
    with made(device, device_pages=2, overflow="raise_at_step_end", close=False) as stash:
        norm = torch.nn.BatchNorm1d(WIDTH, device=device)
        module, x, one = layers_of(device), randn(ROWS, WIDTH, device=device), count(ROWS, device)
        stash.register(norm)

        def run(stash=None):
            module.zero_grad(set_to_none=True)
            norm.zero_grad(set_to_none=True)
            z = norm(torch.nn.functional.dropout(x.clone().requires_grad_(), 0.5))
            y = module(z, one, stash)
            torch.nn.functional.dropout(y, 0.5).sum().backward()
            return [p.grad.clone() for p in (*module.parameters(), *norm.parameters())]

        stash.reset()
        state, buffers = torch.get_rng_state(), [b.clone() for b in norm.buffers()]
        run(stash)
        assert not stash.verdict(wait=True).ok
        with refused(RuntimeError, "PagedStash.rerun", "weight", "not zero", "Zero the gradients"):
            stash.register(module)
            stash.rerun(lambda: run(stash))
        stash.grow()
        for p in (*module.parameters(), *norm.parameters()):
            p.grad = None
        found = stash.rerun(lambda: run(stash))
        assert stash.verdict(wait=True).ok and stash.close().ok
        after = [b.clone().view(-1) for b in norm.buffers()]
        torch.set_rng_state(state)
        for buffer, value in zip(norm.buffers(), buffers, strict=True):
            buffer.copy_(value)
        if device == "cpu":
            same(found, run())
            same(after, [b.view(-1) for b in norm.buffers()])


def test_a_bad_step_that_runs_again_as_it_is(device):
    with made(device, device_pages=1, overflow="raise_at_step_end", close=False) as stash:
        t, turns = filled(100, 64, torch.uint8, device), []

        def run():
            turns.append(1)
            assert len(turns) == 1 or stash.verdict() is None  # the bad one was read
            stash.stash("a", [t], count(100 if len(turns) == 1 else 1, device))

        stash.reset()
        run()
        assert not stash.verdict(wait=True).ok
        stash.rerun(run)
        stash.reset()
        assert len(turns) == 2 and stash.close().ok


def test_trap_ends_the_process(device):
    program = (
        "import torch; from transformer_engine.pytorch.stash import PagedStash\n"
        f"d = torch.device({device!r}); s = PagedStash(256, 1, overflow='trap', device=d)\n"
        "s.stash('big', [torch.ones(1000, 8, device=d)], torch.tensor([900], device=d)); s.verdict(wait=True)\n"
        "print('still there')\n"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert ended.returncode != 0 and "still there" not in ended.stdout
    said = ended.stderr if device == "cpu" else ended.stdout + ended.stderr  # CUDA's printf goes to stdout
    words = ("te_stash_store: group 0", "neither tier has space", "options.trap ends the process")
    assert all(word in said for word in words), said


def test_groups_on_threads(device):
    """One stash for each thread works; one stash for all threads raises."""

    def run(i):
        torch.manual_seed(i)
        with made(device) as stash:
            module, x, one = layers_of(device), given(device), count(LIVE, device)
            expected, _ = step(module, [x], [one], overwrite=False)
            for _ in range(3):
                same(step(module, [x], [one], stash, overwrite=False)[0], expected)
                stash.reset()
            return report(stash)["flags"]

    assert in_threads(2, run) == [0, 0]


def test_one_layer_is_kept_without_a_warning(device, recwarn):
    """Its own backward is next: nothing is stored, and this is not an error."""
    with made(device) as stash:
        module, x, one = layers_of(device, 1), given(device), count(LIVE, device)
        expected, _ = step(module, [x], [one])
        for _ in range(3):
            same(step(module, [x], [one], stash)[0], expected)
            stash.reset()
        assert not recwarn.list
        z = x.clone().requires_grad_()
        with stash.group("a"):
            z = z.sin()
        with pytest.warns(UserWarning, match="stashed nothing"):
            stash.reset()


def optimizers(device):
    """Optimizers that take found_inf on the device of the parameters."""
    names = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW, "sgd": torch.optim.SGD}
    made = {name: (lambda p, kind=kind: kind(p, lr=0.1, fused=True)) for name, kind in names.items()}
    if device == "cuda":
        made["FusedAdam"] = lambda p: te.optimizers.FusedAdam(p, lr=0.1, capturable=True)
    return made


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd", "FusedAdam"])
def test_the_gate_keeps_a_bad_step_out(name, device):
    """Parameters and states keep their bits, and the next good step continues from them."""
    if name not in optimizers(device):
        pytest.skip("FusedAdam takes found_inf with capturable=True, which needs CUDA tensors")
    module, plain = layers_of(device, 1), layers_of(device, 1)
    plain.load_state_dict(module.state_dict())
    both = [(m, optimizers(device)[name](m.parameters())) for m in (module, plain)]
    x, one, t = given(device), count(LIVE, device), filled(100, 64, torch.uint8, device)

    def states(optimizer):
        return [v.clone().view(-1) for state in optimizer.state.values() for v in state.values() if v is not None]

    with made(device, device_pages=3) as stash:
        for bad in (False, True, False):
            for m, optimizer in both if not bad else both[:1]:
                step(m, [x], [one])
                before = [p.detach().clone() for p in m.parameters()], states(optimizer)
                handle = stash.stash("a", [t], count(100 if bad else 1, device)) if m is module else None
                optimizer.found_inf = stash.gate() if handle else torch.zeros((), device=device)
                optimizer.step()
                if bad:
                    same([p.detach() for p in m.parameters()], before[0])
                    same(states(optimizer), before[1])
                    assert all(p.grad.any() for p in m.parameters())
            stash.reset()
            same([p.detach() for p in module.parameters()], [p.detach() for p in plain.parameters()])
            same(states(both[0][1]), states(both[1][1]))


def test_a_lost_group_in_a_step(device):
    """Gradients that read its rows are NaN, the verdict names it, and no other group is lost."""
    with made(device, device_pages=4) as stash:
        whole = Whole(stash, device)
        whole.module.zero_grad(set_to_none=True)
        y = whole.module(whole.x.clone().requires_grad_(), whole.counter, stash)
        y[:LIVE].sum().backward()
        weights = [layer.weight.grad for layer in whole.module.layers]
        verdict = stash.verdict(wait=True)  # groups of 448 bytes; two of them fit
        assert verdict.flags == ("lost",) and verdict.group == 2 and float(stash.gate()) == 1
        assert weights[2].isnan().all() and not any(w.isnan().any() for w in weights[:2])
        stash.grow()
        whole(), whole()
