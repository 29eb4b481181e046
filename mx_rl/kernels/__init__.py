"""Single passes over memory: ``reference`` says what each computes, ``cpu`` is the same made fast by numba."""
