"""The public names: a list that changes only on purpose."""

import importlib

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
