"""How bytes move between processes."""
