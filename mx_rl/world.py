"""The layout of all trainer ranks together: WorldLayout, merged, checked for agreement and coverage, stored compactly.

Tensors that are cut alike share one pattern of boxes: 60,000 tensors over 64 ranks are a few dozen patterns.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mx_rl.columns import Flags, Ints, Packer, Unpacker, chunks, expand, groups, ints, starts_of
from mx_rl.errors import InvalidArgument, layout_mismatch
from mx_rl.layout import (
    ALIGN,
    DTYPE_NAMES,
    MAX_ARENA_BYTES,
    Boxes,
    RankLayout,
    Table,
    check,
    check_inside,
    within,
)
from mx_rl.tensors import natural_key

MAX_RANKS = 1 << 20
