"""A captured callable when it is called: what is checked, what is copied, and which graphs are replayed."""
