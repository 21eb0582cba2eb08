"""`python -m xorflow.report`: write the blocks of the documents in this folder from its result files.

The table and the pictures of the reproduction are made anew first, from the files of its runs.
"""

from pathlib import Path

from xorflow.report.documents import update_documents
from xorflow.report.reproduction import write_reproduction

if __name__ == "__main__":
    paper = Path.cwd() / "results/paper"
    if (paper / "plan.json").exists():
        write_reproduction(paper)
    update_documents(Path.cwd())
