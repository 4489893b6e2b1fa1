"""Experiments that make a table of several runs."""
