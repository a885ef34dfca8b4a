"""What changes from call to call of a captured callable, and what ends it. Plain data; who reads and writes it is
replay.py, replay_refusals.py and weight_grads.py."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(slots=True, eq=False)
class Calls:
    turn: int = 0  # of forward replays: a backward belongs to the latest one
    backward_turn: int = 0
    all_moved: bool = False  # the latest call was given no static input itself
    whole: bool = False  # a call is followed by the whole graph, whatever event the caller has
    wgrad_due: tuple | None = None  # what waits for backward_dw(): (stream, microbatch, unwanted parameters by id)
    ran_eager: bool = False  # the latest call did: what it left is the module's own
    mismatches: int = 0  # calls in another mode, train or eval, than that of the capture


@dataclass(slots=True, eq=False)
class Fitness:
    unfit: str | None = None  # why it cannot be called any more
    gone: bool = False  # its graphs were dropped
    on_reset: Callable[[], object] | None = None
