"""One step of a stash (csrc/stash/stash_step.h): what is done once a step, or only while it is recorded."""

from __future__ import annotations

import warnings

from transformer_engine.pytorch import _C
from transformer_engine.pytorch.stash.pool import Pool
from transformer_engine.pytorch.stash.schedule import Entry, Operation
from transformer_engine.pytorch.stash.sizes import Size

# From one reset() to the next. trace: of groups between schedulers their entries, of others what they do; sizes: of
# groups, by their keys; names: of stores, by number.
Step = _C.StashStep


def is_whole(step: Step) -> bool:
    """Whether all that came by came back."""
    away = set()
    for e in step.trace:
        store, key = (e.store, e.key) if isinstance(e, Operation) else (e.forward, e[1:])
        (away.add if store else away.discard)(key)
    return not away


def _evict_farthest(step: Step, pool: Pool) -> None:
    """Where few device pages would be free by the counts of the recorded step, the group whose backward is farthest
    goes to the host; the device, which has the real counts, may let it be."""
    pages, low = step.stash.recorded_pages, step.stash.low_water
    away = {h.key: h for h in step.scheduled if h.state in ("stored", "away") and not h.evicted}
    free = pool.native.device_pages - sum(pages.get(key, 0) for key in away)
    for entry in reversed(step.stash.schedule.ahead()):
        if free >= low:
            return
        handle = None if entry.forward else away.get(entry[1:])
        if handle is not None:
            handle.evict(low)
            free += pages.get(handle.key, 0)


def _endless(step: Step) -> None:
    """Without a reset() what is recorded would grow with every step."""
    step.forget_records()
    schedule = step.stash.schedule
    if not schedule.known:
        schedule.entries, schedule.endless = [], True
    warnings.warn(
        "PagedStash: more than 1,000 microbatches of one group came by in one step. reset() starts a step: without it "
        "the first one never ends, which keeps everything where the number of pages is not given, and no order is "
        "known. Its records are dropped; call reset() before each step.",
        stacklevel=3,
    )


_C.set_stash_python(Entry, Operation, Size.of, _evict_farthest, _endless)
