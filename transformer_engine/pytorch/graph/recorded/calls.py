"""What changes from call to call of a captured callable, and what ends it. Plain data; who reads and writes it is
replay/replay.py and what it is made of."""

from collections.abc import Callable


class Calls:
    __slots__ = ("all_moved", "backward_turn", "mismatches", "ran_eager", "told", "turn", "wgrad_due", "whole")

    def __init__(self) -> None:
        self.turn = 0  # of forward replays: a backward belongs to the latest one
        self.backward_turn = 0
        self.all_moved = False  # the latest call was given no static input itself
        self.whole = False  # a call is followed by the whole graph, whatever event the caller has
        self.wgrad_due: tuple | None = None  # what waits for backward_dw(): (stream, microbatch, unwanted parameters)
        self.ran_eager = False  # the latest call did: what it left is the module's own
        self.told = False  # that it was called in an autocast and captured without
        self.mismatches = 0  # calls in another mode, train or eval, than that of the capture


class Fitness:
    __slots__ = ("gone", "on_reset", "unfit")

    def __init__(self) -> None:
        self.unfit: str | None = None  # why it cannot be called any more
        self.gone = False  # its graphs were dropped
        self.on_reset: Callable[[], object] | None = None
