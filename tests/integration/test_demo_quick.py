"""The demo as a user starts it, with the tiny model: a process of its own, real Ray, real NIXL, a real SIGKILL."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.timeout(600)
def test_quick_demo_learns_survives_its_faults_and_ends_with_equal_weights(tmp_path):
    out = tmp_path / "run"
    done = subprocess.run(
        [sys.executable, "-m", "examples.grpo", "--quick", "--out", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    facts = json.loads((out / "summary.json").read_text())
    assert facts["passed"]
    assert facts["reward"]["start"] < 0.3
    assert facts["reward"]["end"] > 0.8
    assert facts["exam"]["before"]["reward"] < facts["exam"]["after"]["reward"]
    assert facts["ordeal"]["survived"] and facts["trouble"] == ""
    assert facts["ordeal"]["victim"] not in (facts["ordeal"]["replacement"], facts["ordeal"]["newcomer"])
    assert facts["rollouts_compared"] == 3
    assert facts["differing"] == {}
    assert facts["version"] == facts["steps"] + 1
    assert facts["medians"]["wire_bytes"] > 0
    assert (out / "plot.png").read_bytes().startswith(b"\x89PNG")
    steps = [row for row in map(json.loads, (out / "log.jsonl").read_text().splitlines()) if "event" not in row]
    versions = [row["version"] for row in steps]
    assert versions == sorted(set(versions)), "a version went back or came twice"
    assert "bit for bit" in done.stdout
