"""docs/guide.md: its diffs are those of the two example files, both learn, and its snippets run as they are printed."""

from __future__ import annotations

import difflib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.local_ray import ROOT

pytestmark = pytest.mark.timeout(300)  # a busy machine is no failure

GUIDE = (ROOT / "docs" / "guide.md").read_text()
LOOP = ROOT / "examples" / "loop"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", GUIDE, flags=re.S)


def run(*arguments: str, cwd: Path = ROOT) -> str:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_DEDUP_LOGS": "0"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=env, capture_output=True, text=True, timeout=280, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_the_three_edits_are_the_diff_of_the_two_files():
    before, after = [(LOOP / name).read_text().splitlines(keepends=True) for name in ("before.py", "after.py")]
    hunks = "".join(list(difflib.unified_diff(before, after))[2:])
    printed = blocks("diff")
    assert len(printed) == 3
    assert "".join(printed) == hunks


@pytest.mark.parametrize("script", ["before", "after"])
def test_the_loop_learns_and_ends_with_equal_weights(script):
    lines = run("-m", f"examples.loop.{script}").splitlines()
    rewards = [float(found[1]) for line in lines if (found := re.match(r"step \d+: reward (\S+),", line))]
    assert len(rewards) == 31
    assert rewards[0] < 0.4, "one of four actions is right"
    assert rewards[-1] > 0.9
    assert lines[-1] == "the rollouts' weights are the trainer's: True"


@pytest.mark.soak
def test_the_snippets_run_one_after_the_other(tmp_path):
    script = tmp_path / "guide.py"
    snippets = blocks("python")
    assert len(snippets) >= 6
    script.write_text("\n".join([*snippets, 'print("all of the guide ran")']))
    assert run(str(script), cwd=tmp_path).endswith("all of the guide ran\n")
