"""The wheel is whole: built, installed elsewhere without dependencies, it loads the bundled data."""

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent

MOST_BYTES = 14 * 2**20

LOAD = """
import json, xorflow, xorflow.data
digits = xorflow.data.mnist()
print(json.dumps({"file": xorflow.__file__, "data": digits.describe()}))
"""


def run(*command: str, **environment: str) -> str:
    # PYTHONPATH of the tests would make the source tree visible; only what is passed here counts.
    kept = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run(command, cwd=ROOT.anchor, env=kept | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_wheel_carries_everything(tmp_path: Path) -> None:
    built, installed = tmp_path / "built", tmp_path / "installed"
    run(sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(built), str(ROOT))
    (wheel,) = built.glob("xorflow-*.whl")

    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    for needed in (
        "xorflow/py.typed",
        "xorflow/training/recipes.toml",
        "licenses/LICENSE",
        "licenses/NOTICE",
    ):
        assert any(name.endswith(needed) for name in names), needed
    assert wheel.stat().st_size < MOST_BYTES
    assert sum(name.endswith("-ubyte.gz") for name in names) == 4
    assert not [name for name in names if name.startswith(("tests", "benchmarks", "research"))]

    pip = (sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--no-deps", "--no-index")
    run(*pip, "--target", str(installed), str(wheel))
    told = json.loads(run(sys.executable, "-c", LOAD, PYTHONPATH=str(installed)))
    assert Path(told["file"]).is_relative_to(installed)
    assert told["data"]["sizes"] == {"train": 50_000, "validation": 10_000, "test": 10_000}
    assert told["data"]["sha256"]["test"].startswith("7bc203c30d5ca4d2")
