"""Training: options, the loop, checkpoints, and runs as folders."""

from xorflow._devices import out_of_memory_as_error, resolve_device, tf32_matmul
from xorflow.training.auto import auto_fit, unsuitable
from xorflow.training.auto_run import begin_auto, resume_auto
from xorflow.training.build import build_data, build_estimator, build_flow, init_from_data
from xorflow.training.checkpoint import Progress
from xorflow.training.chow_liu import chow_liu
from xorflow.training.combine import combine_runs, mixture_of
from xorflow.training.config import HARMLESS, OPTIONS, Options, from_mapping, read_config
from xorflow.training.folder import Run, load, open_run, read_config_file, read_metrics, read_result
from xorflow.training.jobs import Job, JobObserver, Outcome, run_jobs, spread, summarise
from xorflow.training.parallel import together
from xorflow.training.registry import (
    BASES,
    CONDITIONERS,
    ESTIMATORS,
    POSTERIORS,
    TRANSFORMS,
    Registry,
    flow_to_spec,
    value_rule,
    value_text,
)
from xorflow.training.results import independent_nll, refitted, report, require_finite
from xorflow.training.run import (
    complete_result,
    create_run,
    finish_run,
    fit,
    resume_run,
    save,
    train_along,
    untrained,
)
from xorflow.training.spec import flow_from_spec
from xorflow.training.trainer import Interrupted, Observer, Trainer

__all__ = [
    "BASES",
    "CONDITIONERS",
    "ESTIMATORS",
    "HARMLESS",
    "OPTIONS",
    "POSTERIORS",
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
    "auto_fit",
    "begin_auto",
    "build_data",
    "build_estimator",
    "build_flow",
    "chow_liu",
    "combine_runs",
    "complete_result",
    "create_run",
    "finish_run",
    "fit",
    "flow_from_spec",
    "flow_to_spec",
    "from_mapping",
    "independent_nll",
    "init_from_data",
    "load",
    "mixture_of",
    "open_run",
    "out_of_memory_as_error",
    "read_config",
    "read_config_file",
    "read_metrics",
    "read_result",
    "refitted",
    "report",
    "require_finite",
    "resolve_device",
    "resume_auto",
    "resume_run",
    "run_jobs",
    "save",
    "spread",
    "summarise",
    "tf32_matmul",
    "together",
    "train_along",
    "unsuitable",
    "untrained",
    "value_rule",
    "value_text",
]
