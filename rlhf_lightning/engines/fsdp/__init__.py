"""The FSDP engine, the default for training and scoring: see `engine`."""
