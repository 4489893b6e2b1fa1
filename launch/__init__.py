"""The programs, one a module with ``main(argv)`` and ``cli()``; installed as ttt_jax.launch."""
