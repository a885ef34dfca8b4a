"""A place for the debugging tools that clients import: only their switch, which is off."""
