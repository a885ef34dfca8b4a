"""The place of debugging tools that clients import: their switch alone, which is off."""
