"""What is switched on around the code that asks: the contexts that write it, and the manager that clients ask."""
