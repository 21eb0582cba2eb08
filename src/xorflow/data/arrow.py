"""pyarrow's functions on columns, which it makes when it is imported: no checker of types knows them."""

from typing import Any

import pyarrow.compute

compute: Any = pyarrow.compute
