"""The native generator: it decodes with the weights of a training engine as they are, in plain PyTorch."""
