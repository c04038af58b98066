"""Commands that need no trainer: one a file, each a function of its arguments."""
