"""Every kernel compiles for two architectures, to the PTX that this Triton makes of its source at commit c7bfae4.

That is the source that last ran on a GPU, not the binary: the figures there were measured with Triton 3.6.0.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import triton

HERE = Path(__file__).parent
RECORD = json.loads((HERE / "ptx.json").read_text(encoding="utf-8"))


def test_the_kernels_compile_to_the_recorded_ptx(tmp_path: Path) -> None:
    # in a process of its own: here they are interpreted; and with an empty cache, so that ptxas has to agree
    settings = {"TRITON_DISABLE_LINE_INFO": "1", "TRITON_CACHE_DIR": str(tmp_path), "TRITON_INTERPRET": "0"}
    command = [sys.executable, str(HERE / "compile_kernels.py"), "xorflow._cuda.triton_kernels"]
    done = subprocess.run(
        command, env=os.environ | settings, capture_output=True, text=True, check=False, timeout=150
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["triton"] == RECORD["triton"] == triton.__version__
    assert found["ptx"] == RECORD["ptx"]
