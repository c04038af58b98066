"""The native generator: decodes with a training engine's own weights, in plain PyTorch."""
