# Layers whose ranks push rows into each other's memory (tp_overlap="chunked"), several processes on the CPU, on CUDA
# devices of their own, or on one: the bits of the same layers over the group. Mutants, in csrc/layer/tp_comm_peer.cpp
# and common/ops/comm/peer.cpp: a wait left out, a run before its rows, a word that is not put back, partials in the
# order in which they arrive, turn these red.
import re
from types import SimpleNamespace

import pytest
import torch
from ranks import as_peers, here
from support import call_op, refused

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.distributed import peer

from . import parallel_workers
from . import peer_graph_workers as graph_workers
from . import peer_workers as workers

pytestmark = pytest.mark.dist


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_chunked_is_serial(ranks):
    for wrong, usage in as_peers(workers.same_bits, torch.float32, ranks=ranks):
        assert not wrong, "\n".join(wrong[:8])
        assert usage.leased == 0 and usage.slots > 0


def test_chunked_is_serial_in_bfloat16():
    for wrong, _ in as_peers(workers.same_bits, torch.bfloat16):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("recipe", ["current", "block", "delayed", "current, dequantized"])
def test_chunked_is_serial_in_fp8(recipe):
    for wrong, _ in as_peers(workers.same_bits, torch.bfloat16, (recipe,)):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.parametrize("name", sorted(parallel_workers.MODULES))
def test_divided_is_whole(name):
    """Every option of every module, over channels; what recomputes its gather to the bits of what keeps it."""
    for wrong in as_peers(parallel_workers.products, name, torch.float32, "none", "chunked"):
        assert not wrong, "\n".join(wrong[:5])


def test_products_without_runs_are_serial():
    for wrong, _ in as_peers(workers.same_bits, torch.float32, ("none",), "libtorch"):
        assert not wrong, "\n".join(wrong[:8])


def test_replays_have_the_bits_of_eager_steps():
    for wrong in as_peers(graph_workers.callables):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.gpu
def test_500_replays_and_eager_calls_between():
    for wrong in as_peers(graph_workers.whole_steps):
        assert not wrong, "\n".join(wrong[:8])


@pytest.mark.gpu
def test_runs_follow_what_their_caller_has_enqueued():
    """Mutant: a second stream that does not wait for the first one (run_streams.cpp); test_chunked_is_serial has the
    one that is not waited for."""
    for wrong in as_peers(workers.behind_what_is_late):
        assert not wrong, "\n".join(wrong[:8])


def test_explain_shows_the_path_over_peers():
    for found in as_peers(workers.explained):
        for rows in found.values():
            paths = [path for _, path, _ in rows]
            assert sum("peers, chunked" in path for path in paths) == 2, rows  # in the forward and in the backward


@pytest.mark.skipif(here().type == "cuda", reason="products allocate workspaces there")
def test_chunks_add_no_work_of_the_host_that_is_not_needed():
    """Mutants: a channel that Python looks up for each call (parallel.py), a chunk with a tensor for its shape
    (tp_comm.h), a result that is a view (tp_comm_peer.cpp)."""
    for found in as_peers(workers.host_work):
        for serial, chunked, operators in found.values():
            assert chunked == serial
            assert set(operators) == {"aten::empty"}, operators
        assert [found[kind][2]["aten::empty"] for kind in ("column", "row")] == [1, 2]  # results, and a row's partials


def test_a_column_gathers_again_while_its_input_gradient_is_computed():
    """Mutant: a backward that begins nothing ahead (GroupTPComm::begins_ahead)."""
    for found in as_peers(workers.explained):
        for kind in ("column", "norm"):
            ops = [(op, path) for op, path, _ in found[kind]]
            gather = ops.index(("peer_gather", "peers, serial"))
            assert gather < next(i for i, (op, _) in enumerate(ops) if op == "linear_dgrad"), ops


def test_nothing_is_gathered_for_a_product_that_waits():
    """Until backward_dw(). Mutant: a gather that does not ask whether wgrad is computed now (backward.cpp)."""
    for leased, wrong in as_peers(workers.left_to_backward_dw):
        assert leased == 0 and not wrong, (leased, wrong)


def test_what_is_kept_comes_over_peers():
    """Mutant: a gather by the group without pooled buffers (tp_comm_group.cpp)."""
    for found in as_peers(workers.explained_keeping):
        for kind in ("column", "norm"):
            ops = [(op, path) for op, path, _ in found[kind] if "gather" in op]
            assert len(ops) == 1 and "peers, chunked" in ops[0][1], ops
    for paths in as_peers(workers.keeping_in_fp8):
        assert paths and all("peers" in path for path in paths), paths


# The costs of one tile and of a link: of 16 x 16 tiles, one at a time, a product takes some ms on any of these devices.
SLOW = {"units": 1, "tile_rows": 16, "tile_cols": 16, "flops_per_us": 1e3, "launch_us": 0.01, "hop_us": 0.01}


@pytest.mark.parametrize("ranks", [2, 3])
def test_auto_goes_by_the_costs_of_the_device(ranks):
    """Mutant: a plan that is asked for runs in any case (tp_comm_peer.cpp)."""
    for wrong, found in as_peers(workers.of_costs, {**SLOW, "link_bytes_per_us": 100}, ranks=ranks):
        assert not wrong, "\n".join(wrong[:8])
        for rows in found.values():
            assert sum("peers, chunked" in path for _, path, _ in rows) == 2, rows


def test_auto_is_serial_where_that_is_faster():
    for wrong, found in as_peers(workers.of_costs, {**SLOW, "launch_us": 1e6}):
        assert not wrong, "\n".join(wrong[:8])
        for rows in found.values():
            paths = [path for _, path, _ in rows]
            assert "peers, serial" in paths and not any("chunked" in path for path in paths), rows
            assert any("predicted to be faster" in why for *_, why in rows), rows


@pytest.mark.parametrize("few", ["least_gathered", "least_scattered"])
def test_auto_of_few_tokens_goes_over_the_group(few):
    """Forward and backward. Mutants: one rank's tokens in place of all ranks', the other operation's least
    (GroupTPComm::peers)."""
    tokens = 2 * workers.TOKENS * workers.BATCH
    least = {"least_gathered": tokens, "least_scattered": tokens, few: tokens + 1}
    for wrong, found in as_peers(workers.of_costs, {**SLOW, "link_bytes_per_us": 100, **least}):
        assert not wrong, "\n".join(wrong[:8])
        for rows in found.values():
            gathers = [row for row in rows if "gather" in row[0]]
            scatters = [row for row in rows if "scatter" in row[0] or "exchange" in row[0]]
            assert gathers and scatters, rows
            small, large = (gathers, scatters) if few == "least_gathered" else (scatters, gathers)
            assert all("peers" in path for _, path, _ in large), rows
            assert {path for _, path, _ in small} == {"process group, serial"}, rows
            words = "a gather of fewer than {least_gathered} tokens, or a scatter of fewer than {least_scattered}"
            assert all(words.format(**least) in why for _, _, why in small), rows


@pytest.mark.skipif(_C.comm_least_rows(peer.kind_of(here())) is not None, reason="this kind of device was measured")
def test_auto_explains_that_a_device_was_not_measured():
    for found in as_peers(workers.explained, "auto"):
        for rows in found.values():
            whys = {why for op, _, why in rows if op.startswith("group")}
            assert whys and all("no measured costs for this device" in why for why in whys), rows


def test_ranks_that_do_not_reach_each_other():
    """Mutants: places that are not compared; "auto" that raises too (parallel.py)."""
    reason = "do not reach each other's memory: they are not on one machine"
    for raised, memory, wrong, found in as_peers(workers.out_of_reach, {**SLOW, "link_bytes_per_us": 100}):
        assert len(raised) == 6 and memory == (0, 0), (raised, memory)
        for words in raised:
            assert reason in words and "argument 'tp_overlap' is 'chunked'" in words and "use 'auto' or 'off'" in words
        assert not wrong, "\n".join(wrong[:8])
        for rows in found.values():
            group = [(path, why) for op, path, why in rows if op.startswith("group")]
            assert group and {path for path, _ in group} == {"process group, serial"}, rows
            assert all(reason in why and "chunked" not in why for _, why in group), rows


@pytest.mark.parametrize("multicast", [0, 4096])
def test_memory_with_multicast_is_refused(multicast, monkeypatch):
    """As torch would hand it out where its environment does not say otherwise."""
    import torch.distributed._symmetric_memory as symm_mem

    handle = SimpleNamespace(multicast_ptr=multicast, buffer_ptrs=(1, 2))
    monkeypatch.setattr(symm_mem, "empty", lambda size, **options: torch.empty(size, dtype=torch.uint8))
    monkeypatch.setattr(symm_mem, "rendezvous", lambda memory, group: handle)
    meeting = SimpleNamespace(op="Linear", group="a group", device=torch.device("cpu"))
    if multicast:
        with refused(RuntimeError, "Linear", "'a group'", "multicast", "TORCH_SYMM_MEM_DISABLE_MULTICAST=1", "'off'"):
            peer._Meeting._grow_symmetric(meeting, 64)
    else:
        memory, addresses, kept = peer._Meeting._grow_symmetric(meeting, 64)
        assert memory.numel() == 64 and addresses == [1, 2] and kept is handle


@pytest.mark.parametrize(
    "packed, words",
    [
        ((3, 1, 1, 2), "3 as its number 0, mode; wanted 1 (column) or 2 (row)"),
        ((1, 1, 3, 2), "3 as its number 2, recompute; wanted 0 (kept), 1 (gathered again) or 2 (as it came)"),
        ((1, 1, 1, -1), "-1 as its number 3, ranks"),
        ((2, 1, 1, 2, 3), "3 as its number 4, sum; wanted 0 (the group), 1 (one_shot) or 2 (two_shot)"),
        ((2, 1, 1, 2, 0, 3), "3 as its number 5, overlap; wanted 0 (serial), 1 (in runs over peers) or 2"),
        ((1, 1, 1), "3 integers, wanted none, or 4 to 6"),
    ],
)
def test_an_invalid_tp_comm(packed, words):
    """As a schema carries it."""
    x, weight = torch.randn(4, 8), torch.randn(8, 8)
    with pytest.raises(ValueError, match=re.escape(f"argument 'parallel' has {words}")):
        call_op(torch.ops.te.linear.default, x=x, weight=weight, parallel=list(packed), group="a group")
