"""Passes of a model over rows that lie one behind the other without padding, none of them made twice."""
