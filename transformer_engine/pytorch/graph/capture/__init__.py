"""The capture in make_graphed_callables: arguments, plan, warm-up, the captures, and the state restored after them."""
