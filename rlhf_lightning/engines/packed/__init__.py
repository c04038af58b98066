"""Training and scoring passes over packed rows: concatenated without padding, and no work done twice."""
