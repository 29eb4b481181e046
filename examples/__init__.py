"""Programs that use mx-rl, each started by ``python -m examples.<name>``."""
