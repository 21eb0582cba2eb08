"""mostlyai-engine on cells, in an environment of its own: `PYTHON mostly.py CELLS OUT`, as `fit.py` does for the others.

    pip install mostlyai-engine==2.7.3 torch==2.13.0 && pip uninstall torchvision torchaudio

Its default training, on our split into training and validation rows. Ordered columns come as integers, the others as strings;
the engine makes one column of each, so that its likelihoods are masses of the same cells.
"""

# pyright: reportMissingImports=false
from __future__ import annotations

import resource
import sys
import tempfile

import numpy as np
import pandas as pd
from mostlyai.engine import analyze, encode, generate, set_random_state, split, train
from mostlyai.engine._common import load_generated_data
from mostlyai.engine._tabular.probability import log_prob
from mostlyai.engine._workspace import Workspace


def main(cells: str, out: str) -> None:
    """Train, score the test rows, sample."""
    given = dict(np.load(cells))
    names = [f"column{d}" for d in range(len(given["sizes"]))]
    texts = {name: str for d, name in enumerate(names) if d not in given["ordered"]}
    train_rows, others, test = (
        pd.DataFrame(given[part], columns=names).astype(texts) for part in ("train", "validation", "test")
    )
    set_random_state(0)
    with tempfile.TemporaryDirectory() as folder:
        split(
            pd.concat([train_rows, others], ignore_index=True),
            trn_val_split=lambda keys: (keys[: len(train_rows)], keys[len(train_rows) :]),
            workspace_dir=folder,
        )
        analyze(workspace_dir=folder)
        encode(workspace_dir=folder)
        train(workspace_dir=folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        log_p = log_prob(workspace=Workspace(folder), data=test)
        generate(sample_size=int(given["samples"]), workspace_dir=folder)
        # its state for what is rare is our state 0
        samples = load_generated_data(folder).replace("_RARE_", "0").astype(int).to_numpy()
    cost = {"cpu_seconds": used[0] + used[1], "megabytes": used[2] / 1024, "orderings": 1}
    np.savez(out, log_p=log_p, samples=samples, **cost)


if __name__ == "__main__":
    main(*sys.argv[1:])
