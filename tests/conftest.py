"""Settings that every test shares."""

from hypothesis import settings

settings.register_profile("mx-rl", deadline=None)  # a busy machine is no failure
settings.load_profile("mx-rl")
