"""Commands that need no trainer: `rlhf export`, `map`, `calibrate` and `reshard`, each in a file of its name.

`parser` is what they share; `redistribution`, `blocks` and `reshard_picture` belong to `reshard`.
"""

COMMANDS = ("export", "map", "calibrate", "reshard")
