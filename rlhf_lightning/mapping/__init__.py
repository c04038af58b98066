"""The automatic device mapping: which models share which devices, in which layouts, how fast and why."""
