"""The bytes of `_extra_state`: written, and read as plain data, also those of Transformer Engine."""
