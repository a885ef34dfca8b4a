"""The streams that a stash copies on, and who waits for whom (csrc/stash_lanes.h). What is copied is the pool's."""

from __future__ import annotations

from transformer_engine.pytorch import _C

STORE, LOAD, COMPUTE = "store", "load", "compute"

Lanes = _C.StashLanes  # log: told each call, where it is a list
Point = _C.StashPoint  # a place in a lane: what was given to it so far
