"""What looks at a module by running it: te.explain, te.memory_plan, te.tune, and the run and undo that they share."""
