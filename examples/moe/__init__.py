"""The parts of examples/moe_stash.py: MoE blocks with te.MoEMLP, and steps of a stack of them."""
