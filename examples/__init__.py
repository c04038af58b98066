"""Programs that show one thing each; all of them run in CI."""
