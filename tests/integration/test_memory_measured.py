"""The formulas of docs/memory.md against the peak resident bytes of a fresh process: within 2 %."""

import json
import subprocess
import sys

import pytest

from tests.flows.test_memory_formula import ARENA_OF_NOTHING, arena, packed, slot, stage
from tests.flows.test_memory_modes import MODES

ROWS = 4096  # 11 x 16 MiB: about 200 MB a model
SIZES = [4096 * ROWS] * 11 + [4 * 12345]


def measure(mode):
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.measured", str(ROWS), json.dumps(mode)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


def close(found, formula):
    return abs(found["peak"] - found["base"] - formula) <= 0.02 * formula


def test_a_publisher_takes_its_model_and_its_slots():
    found = measure({"publisher": True})
    formula = sum(SIZES) + arena(2, slot(packed(SIZES), len(SIZES)))
    assert found["publisher"]["total_bytes"] == formula
    assert close(found, formula), found


@pytest.mark.parametrize(
    "mode",
    [
        pytest.param(mode, marks=pytest.mark.soak if mode["serve"] == "off" else ())
        for mode in MODES
        if mode["stage"] != "host"
    ],
    ids=str,
)  # here the same as "device"
def test_a_subscriber_takes_what_the_formula_of_its_mode_says(mode):
    found = measure(mode)
    model, pack = sum(SIZES), packed(SIZES)
    if mode.get("swap"):
        own = 2 * arena(1, stage(pack))
    elif mode["stage"] == "none":
        own = model + ARENA_OF_NOTHING
    else:
        own = model + arena(1, stage(pack))
    if mode["serve"] == "live":
        own += ARENA_OF_NOTHING
    assert found["subscriber"]["total_bytes"] == own
    assert close(found, own + found["publisher"]["total_bytes"]), found


def test_a_trainer_and_a_rollout_of_one_process_need_no_more_than_their_models():
    found = measure({"slots": 0, "stage": "none", "serve": "off"})
    formula = 2 * (sum(SIZES) + ARENA_OF_NOTHING)
    assert found["publisher"]["total_bytes"] + found["subscriber"]["total_bytes"] == formula
    assert close(found, formula), found
