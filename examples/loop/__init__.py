"""A small RL loop on Ray, before and after mx-rl: docs/guide.md walks from one to the other."""
