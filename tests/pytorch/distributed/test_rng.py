# CudaRNGStatesTracker and snapshots of random states, on the device that the tracker follows: CUDA where there is one,
# else the CPU.
import contextlib
import copy
import gc
import io
import pickle

import pytest
import torch
from support import assert_same_bits, refused

import transformer_engine.pytorch as te
from transformer_engine.pytorch.distributed import get_all_rng_states
from transformer_engine.pytorch.distributed.rng import Snapshot, _Drawing, _Fork

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # a tracker follows one kind of generator, the machine's


def draw(count=5):
    return torch.rand(count, device=DEVICE)


def drawn_after(seed, count=5):
    """Numbers of the default generator after that seed; its state is left as it was."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return draw(count)


@pytest.fixture
def tracker():
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 21)
    tracker.add("expert", 22)
    return tracker


def test_a_fork_draws_from_its_seed_and_leaves_the_default_alone(tracker):
    torch.manual_seed(5)
    wanted = torch.cat((draw(), draw()))
    torch.manual_seed(5)
    got = [draw()]
    with tracker.fork():
        first = draw()
    with tracker.fork("expert"):
        expert = draw()
    with tracker.fork():
        second = draw()
    got.append(draw())
    assert_same_bits(torch.cat(got), wanted, "the default generator")
    assert_same_bits(first, drawn_after(21), "the first fork")
    assert_same_bits(expert, drawn_after(22), "another name")
    with torch.random.fork_rng():
        torch.manual_seed(21)
        both = draw(), draw()
    assert_same_bits(second, both[1], "a fork goes on where the last one ended")
    assert not torch.equal(first, second)


def test_forks_nest(tracker):
    torch.manual_seed(5)
    with tracker.fork():
        got = [draw()]
        with tracker.fork("expert"):
            draw()
            with tracker.fork():
                got.append(draw())
            draw()
        got.append(draw())
    with torch.random.fork_rng():
        torch.manual_seed(21)
        for part in got:
            assert_same_bits(part, draw())
    assert_same_bits(draw(), drawn_after(5))


def test_an_exception_leaves_the_fork(tracker):
    torch.manual_seed(5)
    with pytest.raises(KeyError, match="mine"), tracker.fork(), tracker.fork("expert"):
        draw()
        raise KeyError("mine")
    assert_same_bits(draw(), drawn_after(5))
    other = te.CudaRNGStatesTracker()
    other.add("expert", 22)
    with other.fork("expert"):
        draw()
    with tracker.fork("expert"), torch.no_grad():
        got = draw()
    with other.fork("expert"):
        assert_same_bits(got, draw(), "what was drawn before the exception stays drawn")


@pytest.mark.parametrize("inside", [False, True])
def test_states_are_snapshots(tracker, inside):
    def numbers():
        with tracker.fork("expert"):
            return draw()

    with tracker.fork("expert"):
        draw()
        states = tracker.get_states() if inside else None
    states = tracker.get_states() if states is None else states
    wanted = numbers(), numbers()
    tracker.set_states(states)
    for want in wanted:
        assert_same_bits(numbers(), want)
    file = io.BytesIO()
    torch.save(states, file)
    file.seek(0)
    fresh = te.CudaRNGStatesTracker()
    fresh.set_states(torch.load(file, weights_only=True))
    assert sorted(fresh.get_states()) == ["expert", "model-parallel-rng"]
    with fresh.fork("expert"):
        assert_same_bits(draw(), wanted[0], "through a file")
    fresh.set_states({"expert": tracker.states_["expert"]})
    with fresh.fork("expert"):
        from_generator = draw()
    assert_same_bits(from_generator, numbers(), "from a generator, which stays the tracker's own")
    assert list(fresh.get_states()) == ["expert"]


def test_states_set_inside_a_fork_are_drawn_from_at_once(tracker):
    states = tracker.get_states()
    with tracker.fork():
        first = draw()
        tracker.set_states(states)
        assert_same_bits(draw(), first)


def test_a_subclass_that_overrides_the_methods():
    """As Megatron-core's: reset, set_states and add call the base's and set an attribute."""

    class Client(te.CudaRNGStatesTracker):
        def __init__(self):
            super().__init__()
            self.reset()

        def reset(self):
            super().reset()
            self.initialized = False

        def add(self, name, seed):
            super().add(name, seed)
            self.initialized = True

    client = Client()
    assert not client.initialized
    client.add("model-parallel-rng", 3)
    with client.fork():
        assert_same_bits(draw(), drawn_after(3))
    assert client.initialized
    client.reset()
    assert client.get_states() == {} and not client.initialized
    client.add("model-parallel-rng", 3)


def test_copies_are_their_own(tracker):
    for how, other in (("deepcopy", copy.deepcopy(tracker)), ("pickle", pickle.loads(pickle.dumps(tracker)))):
        with other.fork():
            assert_same_bits(draw(), drawn_after(21))
        other.add(how, 77)
        assert get_all_rng_states()[how] is other.states_[how]
    with tracker.fork():
        assert_same_bits(draw(), drawn_after(21))


def test_every_live_generator_is_found():
    gc.collect()
    before = set(get_all_rng_states())
    tracker = te.CudaRNGStatesTracker()
    tracker.add("found", 31)
    assert set(get_all_rng_states()) - before == {"found"}
    assert get_all_rng_states()["found"] is tracker.states_["found"]
    tracker.set_states(tracker.get_states())
    assert get_all_rng_states()["found"] is tracker.states_["found"]
    del tracker
    gc.collect()
    assert "found" not in get_all_rng_states()


def test_misuse_is_named_and_changes_nothing(tracker):
    states = tracker.get_states()
    with refused(ValueError, "CudaRNGStatesTracker.add", "'seed'", "21"):
        tracker.add("new", 21)
    with refused(ValueError, "CudaRNGStatesTracker.add", "'name'", "expert"):
        tracker.add("expert", 99)
    with refused(ValueError, "CudaRNGStatesTracker.fork", "'name'", "missing", "expert"), tracker.fork("missing"):
        pass
    assert sorted(tracker.get_states()) == sorted(states)
    for name, state in tracker.get_states().items():
        assert_same_bits(state, states[name], name)
    tracker.add("new", 99)  # the seed of the refused call is free


# ---- snapshots ----


def test_a_snapshot_replays_and_puts_back(device):
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 4)

    def numbers():
        with tracker.fork():
            forked = draw()
        return torch.cat([torch.rand(3), torch.rand(3, device=device).cpu(), forked.cpu()])

    snapshot = Snapshot([torch.ones(1, device=device)], tracker)
    first, second = numbers(), numbers()
    for _ in range(2):
        with snapshot.replayed():
            assert_same_bits(numbers(), first)
            assert_same_bits(numbers(), second)
    third = numbers()
    with snapshot.replayed():
        numbers()
        numbers()
        assert_same_bits(numbers(), third, "outside, as if nothing had been replayed")
    with pytest.raises(KeyError), snapshot.replayed():
        numbers()
        raise KeyError
    fourth = numbers()
    with snapshot.replayed():
        for _ in range(3):
            numbers()
        assert_same_bits(numbers(), fourth, "after an exception")


def test_trackers_that_share_a_name_are_all_listed():
    trackers = [te.CudaRNGStatesTracker() for _ in range(3)]
    for seed, tracker in enumerate(trackers):
        tracker.add("shared", seed)
    listed = get_all_rng_states()
    for tracker in trackers:
        assert any(generator is tracker.states_["shared"] for generator in listed.values())
    assert {"shared", "shared (2)", "shared (3)"} <= set(listed)


@pytest.mark.gpu
def test_forks_inside_a_capture_are_replayed_with_fresh_numbers():
    """Replays of one graph draw what consecutive eager forks draw."""
    tracker = te.CudaRNGStatesTracker()
    tracker.add("model-parallel-rng", 8)
    start = tracker.get_states()

    def numbers():
        with tracker.fork():
            return torch.rand(64, device="cuda")

    wanted = [numbers() for _ in range(3)]
    tracker.set_states(start)
    graph = torch.cuda.CUDAGraph()
    for generator in get_all_rng_states().values():
        graph.register_generator_state(generator)
    with torch.cuda.graph(graph):
        out = numbers()
    for want in wanted:
        graph.replay()
        assert_same_bits(out.clone(), want)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("backward_in", [None, "model-parallel-rng", "expert"])
@pytest.mark.parametrize("forward_in", [None, "model-parallel-rng", "expert"])
def test_a_checkpoint_inside_a_fork_draws_the_same_again(forward_in, backward_in, reentrant):
    """Its function forks too, and draws after that."""

    def run(checkpointed):
        torch.manual_seed(1)
        tracker = te.CudaRNGStatesTracker()
        tracker.add("model-parallel-rng", 21)
        tracker.add("expert", 22)

        def within(name):
            return contextlib.nullcontext() if name is None else tracker.fork(name)

        def function(x):
            with tracker.fork():
                y = torch.nn.functional.dropout(x * x, 0.5)
            z = torch.nn.functional.dropout(y * x, 0.5)
            with tracker.fork("expert"):
                return torch.nn.functional.dropout(z * x, 0.5)

        x = torch.arange(1, 65.0, device=DEVICE, requires_grad=True)
        options = {"use_reentrant": reentrant, "get_rng_state_tracker": lambda: tracker}
        with within(forward_in):
            y = te.checkpoint(function, x, **options) if checkpointed else function(x)
            between = draw()
        with within(backward_in):
            y.sum().backward()
            behind = draw()
        after = [*tracker.get_states().values(), torch.get_rng_state()]
        return [y.detach(), x.grad, between, behind, draw(), *after]

    for number, pair in enumerate(zip(run(True), run(False), strict=True)):
        assert_same_bits(*pair, f"{number}")


def test_forks_of_two_trackers_nest():
    """Each state gives its own numbers in order, independently of forks around it."""
    one, two = te.CudaRNGStatesTracker(), te.CudaRNGStatesTracker()
    one.add("a", 5), two.add("b", 6)
    torch.manual_seed(7)
    got = {"a": [], "b": [], "default": []}
    got["default"].append(draw())
    with one.fork("a"):
        got["a"].append(draw())
        with two.fork("b"):
            got["b"].append(draw())
            between = one.get_states()
            with one.fork("a"):
                got["a"].append(draw())
            got["b"].append(draw())
        got["a"].append(draw())
    got["default"].append(draw())
    with two.fork("b"):
        got["b"].append(draw())
    for name, seed in (("a", 5), ("b", 6), ("default", 7)):
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            want = [draw() for _ in got[name]]
        assert_same_bits(torch.cat(got[name]), torch.cat(want), name)
    one.set_states(between)
    with one.fork("a"):
        assert_same_bits(draw(), got["a"][1])


@pytest.mark.parametrize("how", ["reset", "set_states", "raise"])
def test_a_fork_whose_state_is_taken_away_ends_all_the_same(tracker, how):
    torch.manual_seed(5)
    want = drawn_after(5)
    with contextlib.suppress(KeyboardInterrupt), tracker.fork("expert"):
        draw()
        if how == "reset":
            tracker.reset()
        elif how == "set_states":
            tracker.set_states({})
        else:
            raise KeyboardInterrupt
    assert_same_bits(draw(), want)
    tracker.reset()
    tracker.add("expert", 9)
    with tracker.fork("expert"):
        assert_same_bits(draw(), drawn_after(9))


def test_a_fork_ends_while_another_thread_ends_its_own():
    """Another thread may run between two steps of a loop over the forks: this one has no such loop."""

    class Raced(list):
        def __iter__(self):
            for fork in super().__iter__():
                yield fork
                self.remove(other)  # as if its thread had run here

    drawing, other = _Drawing(), _Fork(None, None)
    drawing.forks = Raced([other])
    with drawing.of(None, None):
        pass
    assert drawing.forks == [other]


def test_a_tracker_keeps_its_states_inside_the_fork_of_another_one():
    """Of one name: only the tracker that has forked reads its state from the default generator."""
    one, two = te.CudaRNGStatesTracker(), te.CudaRNGStatesTracker()
    one.add("shared", 1)
    two.add("shared", 2)
    want = two.get_states()["shared"]
    with one.fork("shared"):
        draw()
        assert_same_bits(two.get_states()["shared"], want)
