"""Benchmarks: what `launch/benchmark.py` runs, importable from a notebook."""
