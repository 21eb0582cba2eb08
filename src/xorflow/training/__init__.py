"""Training: options, the loop, checkpoints, and runs as folders."""

from xorflow.training import values
from xorflow.training.build import build_data, build_estimator, build_flow
from xorflow.training.checkpoint import Progress
from xorflow.training.combine import combine_runs, mixture_of
from xorflow.training.config import HARMLESS, OPTIONS, Options, from_mapping, read_config
from xorflow.training.devices import out_of_memory_as_error, resolve_device
from xorflow.training.folder import read_config_file, read_result
from xorflow.training.init import init_from_data
from xorflow.training.jobs import Job, JobObserver, Outcome, run_jobs
from xorflow.training.loop import Interrupted, Observer, Trainer
from xorflow.training.metrics import read_metrics
from xorflow.training.precision import tf32_matmul
from xorflow.training.recipes import RECIPES
from xorflow.training.registry import BASES, CONDITIONERS, ESTIMATORS, PARTS, POSTERIORS, TRANSFORMS, Registry
from xorflow.training.results import independent_nll, likelihood, refitted, report
from xorflow.training.run import (
    Run,
    begin_run,
    complete_run,
    fit,
    load,
    open_run,
    prepare_run,
    reopen_run,
    resume_run,
    train_run,
    untrained,
)
from xorflow.training.specs import flow_from_spec, flow_to_spec
from xorflow.training.tables import plan, read_table, spread, summarise

__all__ = [
    "BASES",
    "CONDITIONERS",
    "ESTIMATORS",
    "HARMLESS",
    "OPTIONS",
    "PARTS",
    "POSTERIORS",
    "RECIPES",
    "TRANSFORMS",
    "Interrupted",
    "Job",
    "JobObserver",
    "Observer",
    "Options",
    "Outcome",
    "Progress",
    "Registry",
    "Run",
    "Trainer",
    "begin_run",
    "build_data",
    "build_estimator",
    "build_flow",
    "combine_runs",
    "complete_run",
    "fit",
    "flow_from_spec",
    "flow_to_spec",
    "from_mapping",
    "independent_nll",
    "init_from_data",
    "likelihood",
    "load",
    "mixture_of",
    "open_run",
    "out_of_memory_as_error",
    "plan",
    "prepare_run",
    "read_config",
    "read_config_file",
    "read_metrics",
    "read_result",
    "read_table",
    "refitted",
    "reopen_run",
    "report",
    "resolve_device",
    "resume_run",
    "run_jobs",
    "spread",
    "summarise",
    "tf32_matmul",
    "train_run",
    "untrained",
    "values",
]
