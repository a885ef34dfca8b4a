# Ranks that push into each other's memory while one of them dies, is stopped, or does something else: the others raise
# in time, name it, and go on in a new group. Mutant, in common/ops/comm/peer_watch.cpp: waits that are not ended.
import os
import signal
import time
from pathlib import Path

import pytest
from ranks import on_cuda

from . import peer_fault_workers as workers

pytestmark = pytest.mark.dist
DEADLINE = 30  # seconds that a rank waits for one that lives
IN_TIME = 15  # in which a rank that died is named, on a busy machine too


@pytest.mark.parametrize("ranks", [2, 3])
def test_a_rank_is_killed(tmp_path, ranks):
    met = workers.ends(workers.starts("killed", tmp_path, ranks, DEADLINE), tmp_path)
    when = float((tmp_path / "when").read_text())
    assert met[1] is None
    for found in (met[0], *met[2:]):
        assert found["peer"] == 1 and "dead" in found["words"] and found["when"] - when < IN_TIME, found
        assert found["nan"] and "has failed" in found["again"] and found["sound"], found


def test_a_rank_is_stopped(tmp_path):
    each = workers.starts("stopped", tmp_path, 2, 3)
    when = tmp_path / "when"
    until = time.monotonic() + 60
    while not when.exists() and time.monotonic() < until:
        time.sleep(0.01)
    os.kill(each[1].pid, signal.SIGSTOP)
    began = time.monotonic()
    try:
        while not (Path(tmp_path) / "met0").exists() and time.monotonic() < began + IN_TIME:
            time.sleep(0.01)
    finally:
        os.kill(each[1].pid, signal.SIGCONT)
    met = workers.ends(each, tmp_path)
    assert met[0]["peer"] == 1 and "late" in met[0]["words"] and 1 < met[0]["when"] - began < IN_TIME, met[0]
    assert met[0]["nan"] and met[1]["rank"] == 0 and "late" in met[1]["words"], met
    assert met[0]["again"] == met[1]["again"] == [], "both go on in a new group"


@pytest.mark.parametrize(
    "name, words",
    [
        ("other_shapes", ["[32, 2, ", "[48, 2, "]),
        ("other_emptiness", ["[32, 2, ", "[0, 2, "]),
        ("other_gradients", ["rank 0", "rank 1", "gather"]),
    ],
)
def test_ranks_in_different_calls(tmp_path, name, words):
    for found in workers.ends(workers.starts(name, tmp_path, 2, 20), tmp_path):
        assert "another call" in found["words"] and all(word in found["words"] for word in words), found
        assert found["step"] == "arrive"


def test_memory_that_grows_differently(tmp_path):
    for found in workers.ends(workers.starts("other_growth", tmp_path, 2, 20), tmp_path):
        assert "different calls" in found["words"] or "gave up" in found["words"], found


def test_a_rank_that_is_late_now_and_then(tmp_path):
    for found in workers.ends(workers.starts("sleepy", tmp_path, 2, 30), tmp_path):
        assert found == {"wrong": 0}


def test_a_rank_dies_while_ranks_meet(tmp_path):
    """Mutant: process ids that are sent after the first meeting of all (distributed/peer.py)."""
    met = workers.ends(workers.starts("dies_while_ranks_meet", tmp_path, 2, DEADLINE), tmp_path)
    when = float((tmp_path / "when").read_text())
    assert met[0]["peer"] == 1 and "dead" in met[0]["words"] and met[0]["when"] - when < IN_TIME, met


@pytest.mark.parametrize("name", ["dies_while_memory_grows"] + ([] if on_cuda() else ["dies_with_memory_made"]))
def test_a_rank_dies_while_memory_grows(tmp_path, name):
    """Nothing is left of a channel's memory, which no directory has a name for; on CUDA a failed channel may outlive
    its group, for streams that have not ended. Mutants: meetings that are kept, descriptors that stay open."""
    each = workers.starts(name, tmp_path, 2, DEADLINE)
    met = workers.ends(each, tmp_path)
    when = float((tmp_path / "when").read_text())
    assert met[0]["peer"] == 1 and "dead" in met[0]["words"] and met[0]["when"] - when < IN_TIME, met
    (maps, opened), (left, left_open) = met[0]["alive"], met[0]["left"]
    assert maps > 0 and opened == left_open == 0 and (left == 0 or on_cuda()), met[0]
