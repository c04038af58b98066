"""Tests: `unit` without Ray, `ray` on a local cluster, `gpu` on CUDA, `packaging` of the distribution."""
