"""The parts of examples/moe_stash.py: MoE blocks in torch's own operations, and steps of a stack of them."""
