"""What is computed: one algorithm a file."""

if __name__ != "rlhf_lightning.algos":
    raise ImportError(f"This folder is imported as 'rlhf_lightning.algos', not as {__name__!r}.")
