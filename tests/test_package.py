"""The package as it is handed out: its public names, a list that changes only on purpose, and a wheel that is whole."""

import importlib
import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import xorflow as xf

PUBLIC = {
    "xorflow": """
        MADE MLP CausalTransformer CheckpointError Conditioner ConfigError Coupling DataError
        FactorisedBase Flow Intractable LatentFlow Layer LogLikelihood Mixture ModelError
        ModularAffine ModularShift Recurrent TableModel Trace Transform UserError Xor data estimators evaluate
        auto_fit fit load refit_base save
    """,
    "xorflow.estimators": """
        ARMS ELBO VIMCO All Analytic Baseline Bias Bound Concrete Credit Descendants DisARM
        DoubleCV Estimator FeatureScale GreedyCritic Impatient LeaveOneOut LocalDivergence
        LocalExpectation Loss MaximumLikelihood NoBaseline Objective OneScale Part
        PrintedDivergence PrintedRewards ProposalPrefix Rebar ReinMax Relax RunningMean
        SampledCritic ScoreFunction Standardiser StraightThrough StraightThroughGumbel
        Target TwoTerm
    """,
    "xorflow.conditioners": """
        MADE MLP BoostedTrees Boosting CausalTransformer Conditioner Coupling Dependence Diagonal MaskedLinear
        Recurrent
        SequenceConditioner Source Stacked coupling_mask ranks resolve_order
    """,
    "xorflow.flows": """
        GREEDY Choices Conditionals Draws Flow LatentFlow Layer Mixture Model ModelDistribution
        Point SampleNoise Stack Steps Trace refit_base with_base
    """,
}


@pytest.mark.parametrize("module", PUBLIC)
def test_public_names_are_pinned(module):
    found = importlib.import_module(module)
    assert sorted(found.__all__) == sorted(PUBLIC[module].split())
    assert all(hasattr(found, name) for name in found.__all__)


@pytest.mark.parametrize(
    "error", [xf.CheckpointError, xf.ConfigError, xf.DataError, xf.Intractable, xf.ModelError]
)
def test_our_errors_have_one_base(error):
    assert issubclass(error, xf.UserError)
    assert error.__doc__


@pytest.mark.parametrize("error", [xf.ConfigError, xf.DataError, xf.ModelError])
def test_bad_values_are_value_errors_too(error):
    assert issubclass(error, ValueError)


def test_public_names_are_documented():
    for name in xf.__all__:
        assert getattr(xf, name).__doc__, name


# ---- the wheel: built, installed elsewhere without dependencies, it loads the bundled data ----


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
