"""Runs worth repeating, as differences from the defaults; each file begins with its command."""

if __name__ != "rlhf_lightning.configs":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.configs', not as {__name__!r}.")
