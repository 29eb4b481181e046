"""Weight sync side by side: the machine's floor, mx-rl, and what people use instead. Run ``python -m benchmarks``."""
