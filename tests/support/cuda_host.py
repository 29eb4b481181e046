"""The CUDA kernels, compiled by g++ beside a shim and run on the host: a device whose memory is numpy's."""

import ctypes
import re
import subprocess
from pathlib import Path

import numpy as np

from mx_rl.kernels.cuda import SOURCE, THREADS

SHIM = Path(__file__).with_name("cuda_shim.h")


def build(folder):
    """Returns the library's path: every kernel as a C function of its grid and 64-bit arguments."""
    source = SOURCE.read_text()
    lines = [f'#include "{SHIM}"', f'#include "{SOURCE}"']
    for name, parameters in re.findall(r"__global__ void (\w+)\(([^)]*)\)", source):
        types = [re.match(r"\s*(.*?[\s*])\w+\s*$", one, re.DOTALL)[1] for one in parameters.split(",")]
        args = ", ".join(f"({kind})a[{i}]" for i, kind in enumerate(types))
        lines.append(f'extern "C" void host_{name}(long long g, long long t, const long long *a)')
        lines.append(f"{{ shim::launch(g, t, [=] {{ {name}({args}); }}); }}")
    program, library = Path(folder) / "host.cpp", Path(folder) / "host.so"
    program.write_text("\n".join(lines))
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", "-w", "-o", str(library), str(program)]
    subprocess.run(command, check=True, capture_output=True, timeout=100)
    return library


class HostDevice:
    def __init__(self, library):
        self._library = ctypes.CDLL(str(library))

    def launch(self, kernel, grid, *args):
        given = (ctypes.c_longlong * len(args))(*args)
        getattr(self._library, f"host_{kernel}")(ctypes.c_longlong(grid), ctypes.c_longlong(THREADS), given)

    def put(self, array):
        """A copy, as on a device: what is written there must be brought back."""
        return np.array(array)

    def zeros(self, count, dtype):
        return np.zeros(count, dtype)

    def address(self, array):
        return array.ctypes.data

    def get(self, array):
        return np.asarray(array)
