"""`python -m xorflow.report`: write the blocks of the documents in this folder from its result files.

The tables and the pictures of the reproduction, of the study, of depths and of strong conditioners are made anew first, from
the files of their runs.
"""

from pathlib import Path

from xorflow.report.depth import write_depth
from xorflow.report.documents import update_documents
from xorflow.report.reproduction import write_reproduction
from xorflow.report.strong import write_strong
from xorflow.report.study import write_study

if __name__ == "__main__":
    paper = Path.cwd() / "results/paper"
    if (paper / "plan.json").exists():
        write_reproduction(paper)
    study = Path.cwd() / "results/study"
    if (study / "plan.json").exists():
        write_study(study)
    depth = Path.cwd() / "results/depth"
    if (depth / "plan.json").exists():
        write_depth(depth)
    strong = Path.cwd() / "results/strong"
    if (strong / "plan.json").exists():
        write_strong(strong)
    update_documents(Path.cwd())
