"""pyarrow's functions on columns, which it makes when it is imported: no checker of types knows them."""

from typing import Any

import pyarrow as pa
import pyarrow.compute

compute: Any = pyarrow.compute


def emptied(cells: pa.Array | pa.ChunkedArray, where: Any) -> Any:
    """The cells, with gaps where that is true: by an array, for with a scalar pyarrow before 24 damages slices of texts."""
    return compute.if_else(where, pa.nulls(len(cells), cells.type), cells)
