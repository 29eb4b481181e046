"""GRPO on Ray: one trainer world, a fleet of rollouts, and every step's weights published over mx-rl."""
