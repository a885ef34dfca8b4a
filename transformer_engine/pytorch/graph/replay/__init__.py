"""The call of a captured callable: checks, copies into static tensors, and the replay of graphs."""
