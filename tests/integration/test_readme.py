"""The README's example runs as it stands."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_the_fifteen_lines_run_as_they_are_printed(tmp_path):
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.S)
    script = tmp_path / "example.py"
    script.write_text(blocks[0].replace("ray.init(", 'ray.init(address="local", '))
    done = subprocess.run(
        [sys.executable, str(script)], cwd=ROOT, env=_env(), capture_output=True, text=True, timeout=110, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    lines = [line for line in done.stdout.splitlines() if line.startswith("[(")]
    assert len(lines) == 3
    versions = [int(re.match(r"\[\((\d+),", line).group(1)) for line in lines]
    assert versions == sorted(set(versions)), "each step is served by its own version"


def _env():
    import os

    return {**os.environ, "PYTHONPATH": str(ROOT)}
