"""How many categories each column has, and the columns that no model can use."""

from collections.abc import Sequence

import torch
from torch import Tensor

from xorflow.data.checks import validate
from xorflow.data.codec import Codec
from xorflow.data.tables import Table, is_number
from xorflow.errors import DataError

LIMIT = 2**16
"""More categories than this in one column are taken for a mistake, unless `categories` states them."""


def fit_codec(table: Table, names: tuple[str, ...] | None, explicit: int | Sequence[int] | None) -> Codec:
    """The codec of a table: the values that occur, or with `explicit` the integers 0..K_d - 1."""
    codec = Codec.fit(table, names)
    if explicit is not None:
        for d, texts in enumerate(table.texts):
            odd = next((text for text in texts if not is_number(text)), None)
            if odd is not None:
                raise DataError(
                    f"categories= is for columns of integers 0..K-1, but {codec.column(d)} holds {odd!r}"
                    "; leave it out, and each column gets the categories that occur in it"
                )
        return Codec.integers(_stated(explicit, table.width), names)
    constant = [d for d, k in enumerate(codec.categories) if k == 1]
    if constant:
        d = constant[0]
        raise _constant(len(constant), table.width, codec.column(d), codec.values[d][0])
    for d, k in enumerate(codec.categories):
        if k > LIMIT:
            raise DataError(
                f"{codec.column(d)} has {k} different values, more than {LIMIT}; drop or group them"
            )
    return codec


def array_categories(arrays: dict[str, Tensor], explicit: int | Sequence[int] | None) -> tuple[int, ...]:
    """K_d as stated, after a check that the data obeys it, or else the maximum over all arrays + 1."""
    low = torch.stack([array.amin(0).to(torch.int64) for array in arrays.values()]).amin(0)  # (D,)
    high = torch.stack([array.amax(0).to(torch.int64) for array in arrays.values()]).amax(0)  # (D,)
    if explicit is not None:
        stated = _stated(explicit, len(low))
        if bool(((low < 0) | (high >= torch.tensor(stated))).any()):
            for array in arrays.values():
                validate(array, stated)  # raises, and names the row
        return stated
    if int(low.min()) < 0:
        d = int(low.argmin())
        raise DataError(f"categories count from 0, but feature {d} holds {int(low[d])}; re-code it as 0..K-1")
    constant = (low == high).nonzero()[:, 0].tolist()
    if constant:
        d = constant[0]
        raise _constant(len(constant), len(low), f"feature {d} (from 0)", int(low[d]))
    if int(high.max()) >= LIMIT:
        d = int(high.argmax())
        raise DataError(
            f"feature {d} reaches {int(high[d])}, which would make more than {LIMIT} categories"
            "; re-code it as 0..K-1, or state categories="
        )
    return tuple((high + 1).tolist())


def _constant(count: int, width: int, first: str, value: str | int) -> DataError:
    return DataError(
        f"a constant column carries no information, and {count} of {width} are constant: first {first}, "
        f"always {value!r}; drop them, or state how many categories there are (categories=2) if they are "
        "integers 0..K-1 that could vary"
    )


def _stated(categories: int | Sequence[int], width: int) -> tuple[int, ...]:
    """The `categories` argument as one K for each feature."""
    stated = (categories,) * width if isinstance(categories, int) else tuple(int(k) for k in categories)
    if len(stated) != width:
        raise DataError(
            f"categories= must state one K, or one for each of {width} columns, got {len(stated)}"
        )
    if min(stated) < 2:
        raise DataError(f"every feature needs at least two categories, categories= states {min(stated)}")
    return stated
