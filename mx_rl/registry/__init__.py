"""Who holds which version: the state machine and its homes."""
