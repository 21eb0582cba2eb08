"""Pictures and tables of results."""

from xorflow.report.images import save_image_grid

__all__ = ["save_image_grid"]
