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
    ordered = {names[d] for d in given["ordered"]}

    def frame(part: str) -> pd.DataFrame:
        values = zip(names, given[part].T, strict=True)
        return pd.DataFrame(
            {name: of_column if name in ordered else of_column.astype(str) for name, of_column in values}
        )

    set_random_state(0)
    rows = len(given["train"])
    with tempfile.TemporaryDirectory() as folder:
        split(
            pd.concat([frame("train"), frame("validation")], ignore_index=True),
            trn_val_split=lambda keys: (keys[:rows], keys[rows:]),
            workspace_dir=folder,
        )
        analyze(workspace_dir=folder)
        encode(workspace_dir=folder)
        train(workspace_dir=folder)
        used = resource.getrusage(resource.RUSAGE_SELF)
        log_p = log_prob(workspace=Workspace(folder), data=frame("test"))
        generate(sample_size=int(given["samples"]), workspace_dir=folder)
        # its state for what is rare is our state 0
        samples = load_generated_data(folder).replace("_RARE_", "0").astype(int).to_numpy()
    np.savez(out, log_p=log_p, samples=samples, cpu_seconds=used[0] + used[1], megabytes=used[2] / 1024)


if __name__ == "__main__":
    main(*sys.argv[1:])
