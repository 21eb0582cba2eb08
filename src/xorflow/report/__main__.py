"""`python -m xorflow.report`: write the blocks of the documents in this folder from its result files."""

from pathlib import Path

from xorflow.report.documents import update_documents

if __name__ == "__main__":
    update_documents(Path.cwd())
