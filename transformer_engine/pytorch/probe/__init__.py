"""Tools that run a module to inspect it: te.explain, te.memory_plan, te.tune, and the run that they share."""
