"""What the README says can be done, can be done: its example runs, its links and commands exist."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


@pytest.mark.slow
def test_the_ten_lines_run(tmp_path):
    script = tmp_path / "ten.py"
    script.write_text(re.search(r"```python\n(.*?)```", README, re.DOTALL).group(1))
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"rank 0: \d+ events, at most [1-9]\d*\.\d MiB alive\n", done.stdout)


def test_links_and_paths_exist():
    links = re.findall(r"\]\(([^)#:]+)\)", README)
    folders = [path for path in re.findall(r"^\| `([^`]+)`", README, re.MULTILINE) if "*" not in path and not path.startswith("reshard")]
    assert len(links) >= 4 and len(folders) >= 5
    for path in links + folders:
        assert (ROOT / path).exists(), path


def test_commands_exist():
    from fsdp_ref.cli import COMMANDS
    named = set(re.findall(r"^fsdp-ref (\w+)", README, re.MULTILINE))
    assert named and named <= set(COMMANDS)
