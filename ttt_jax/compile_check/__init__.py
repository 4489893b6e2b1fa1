"""Compiling a step for devices that are not there, and reading what the compiler made of it."""
