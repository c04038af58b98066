"""The FSDP engine: see `engine`."""
