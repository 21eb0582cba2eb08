"""Pictures and tables of results."""

from xorflow.report.depth import write_depth
from xorflow.report.documents import filled_document, update_documents
from xorflow.report.images import save_image_grid
from xorflow.report.reproduction import make_table, write_reproduction
from xorflow.report.results import read_results
from xorflow.report.strong import write_strong
from xorflow.report.study import write_study
from xorflow.report.summary import Figure, reported_part, run_figures

__all__ = [
    "Figure",
    "filled_document",
    "make_table",
    "read_results",
    "reported_part",
    "run_figures",
    "save_image_grid",
    "update_documents",
    "write_depth",
    "write_reproduction",
    "write_strong",
    "write_study",
]
