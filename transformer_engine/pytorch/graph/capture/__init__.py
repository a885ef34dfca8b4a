"""How make_graphed_callables captures: arguments, plan, warm-up, captures, and what is put back afterwards."""
