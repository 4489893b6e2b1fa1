"""Configurations, one model a module with ``get_config(size)``; installed as ttt_jax.configs."""
