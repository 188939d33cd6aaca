"""The MLX worker's program where MLX is not installed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# What `pip install smg-grpc-servicer` without an extra leaves out, made absent here as well.
PROGRAM = """
import sys
sys.modules.update(dict.fromkeys(sys.argv[1].split(",")))
from smg_grpc_servicer.mlx.server import main
sys.exit(main(["--model", sys.argv[2], "--port", "0"]))
"""


@pytest.mark.parametrize("absent", ["mlx_lm", "mlx_lm,mlx,numpy,tokenizers,jinja2"])
def test_without_mlx_it_exits_3_with_the_command_that_installs_it(
    absent: str, tmp_path: Path
) -> None:
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM, absent, str(tmp_path)],
        env={"PYTHONPATH": str(Path(__file__).parents[3] / "src")},
        capture_output=True,
        text=True,
    )
    assert run.returncode == 3, run.stderr
    last = run.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert "pip install 'smg-grpc-servicer[mlx]'" in last
    assert "Traceback" not in run.stderr
