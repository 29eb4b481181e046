"""Single passes over memory. ``base`` is the contract; ``plain`` and ``reference`` (the digest) say what each computes, in
torch and numpy; ``fast`` is the same made by numba (``cpu*``), ``cuda`` by ``kernels.cu``."""
