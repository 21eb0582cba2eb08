"""Training: options, the loop, checkpoints, and runs as folders."""

from xorflow.training.build import ESTIMATORS, build_data, build_estimator, build_flow
from xorflow.training.checkpoint import Progress
from xorflow.training.combine import combine_runs, mixture_of
from xorflow.training.folder import read_config_file, read_result
from xorflow.training.jobs import Job, JobObserver, Outcome, run_jobs
from xorflow.training.loop import Interrupted, Observer, Trainer
from xorflow.training.options import Options, from_mapping, read_config
from xorflow.training.results import independent_nll, likelihood, refitted, report
from xorflow.training.run import (
    Run,
    fit,
    load,
    open_run,
    prepare_run,
    resume_run,
    train_run,
)
from xorflow.training.specs import PARTS, flow_from_spec, flow_to_spec
from xorflow.training.starts import start_from_data
from xorflow.training.tables import plan, read_table, summarise

__all__ = [
    "ESTIMATORS",
    "PARTS",
    "Interrupted",
    "Job",
    "JobObserver",
    "Observer",
    "Options",
    "Outcome",
    "Progress",
    "Run",
    "Trainer",
    "build_data",
    "build_estimator",
    "build_flow",
    "combine_runs",
    "fit",
    "flow_from_spec",
    "flow_to_spec",
    "from_mapping",
    "independent_nll",
    "likelihood",
    "load",
    "mixture_of",
    "open_run",
    "plan",
    "prepare_run",
    "read_config",
    "read_config_file",
    "read_result",
    "read_table",
    "refitted",
    "report",
    "resume_run",
    "run_jobs",
    "start_from_data",
    "summarise",
    "train_run",
]
