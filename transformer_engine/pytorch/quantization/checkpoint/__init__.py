"""The bytes of `_extra_state`: written, and read back as plain data, those of Transformer Engine too."""
