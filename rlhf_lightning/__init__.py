"""RLHF as a dataflow of large models on a stock Lightning Trainer, with interchangeable placements."""

__version__ = "0.1.0"
