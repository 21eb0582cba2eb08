"""What the categories 0..K_d - 1 of each column stood for in the file that they came from."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from xorflow.data.checks import validate
from xorflow.data.tables import Table, tabulate
from xorflow.errors import DataError


@dataclass(frozen=True)
class Codec:
    """The names of columns, where they have any, and the values of each column in the order of their codes.

    >>> codec = Codec(("colour", "size"), (("blue", "red"), (1, 2, 10)))
    >>> codec.encode([["red", "10"], ["blue", "1"]])
    array([[1, 2],
           [0, 0]], dtype=uint8)
    >>> codec.decode([[1, 2]])
    [['red', '10']]
    """

    names: tuple[str, ...] | None
    values: tuple[tuple[str, ...] | tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if self.names is not None and len(self.names) != len(self.values):
            raise DataError(f"{len(self.names)} names were given for {len(self.values)} columns")

    @classmethod
    def fit(cls, table: Table, names: tuple[str, ...] | None) -> "Codec":
        """The values seen in each column, sorted as numbers where all are integers and as text otherwise."""
        return cls(names, tuple(_sorted_values(texts) for texts in table.texts))

    @classmethod
    def integers(cls, categories: Sequence[int], names: tuple[str, ...] | None = None) -> "Codec":
        """Columns that hold the integers 0..K_d - 1 themselves."""
        return cls(names, tuple(tuple(range(k)) for k in categories))

    @property
    def categories(self) -> tuple[int, ...]:
        return tuple(len(values) for values in self.values)

    def column(self, d: int) -> str:
        """Column `d` as messages call it."""
        return f"column {d + 1}" if self.names is None else f"column {self.names[d]!r}"

    def encode(self, rows: Iterable[Sequence[str | int]]) -> np.ndarray:
        """Rows of cells as codes (N, D), uint8 where every K <= 256 and int64 otherwise."""
        cells = [[str(cell) for cell in row] for row in rows]
        for n, row in enumerate(cells):
            if len(row) != len(self.values):
                raise DataError(
                    f"every row must have {len(self.values)} cells, row {n} (from 0) has {len(row)}"
                )
        return self.encode_table(tabulate(cells, lambda n: f"row {n} (from 0)"))

    def encode_table(self, table: Table) -> np.ndarray:
        """The same for a table that was read from a file."""
        codes = np.empty(table.codes.shape, dtype=narrow(self.categories))
        for d, (values, texts) in enumerate(zip(self.values, table.texts, strict=True)):
            known = {str(value): code for code, value in enumerate(values)}
            codes_of_texts = np.array([_look_up(known, values, text) for text in texts])
            if (codes_of_texts < 0).any():
                self._refuse(table, d, codes_of_texts)
            codes[:, d] = codes_of_texts[table.codes[:, d]]
        return codes

    def decode(self, x: Any) -> list[list[str]]:
        """Codes (N, D) as rows of cells."""
        codes = validate(x, self.categories).cpu().numpy()
        if codes.ndim != 2:
            raise DataError(f"decoding takes rows of shape (N, {len(self.values)}), got {codes.shape}")
        texts = [np.array([str(value) for value in values], dtype=object) for values in self.values]
        return np.stack([t[codes[:, d]] for d, t in enumerate(texts)], axis=1).tolist()

    def to_json(self) -> dict[str, Any]:
        names = None if self.names is None else list(self.names)
        return {"names": names, "values": [list(values) for values in self.values]}

    @classmethod
    def from_json(cls, data: Any) -> "Codec":
        """The inverse of `to_json`, with its input checked."""
        data = data if isinstance(data, dict) else {}
        names, values = data.get("names"), data.get("values")
        good = names is None or (isinstance(names, list) and all(isinstance(n, str) for n in names))
        if not (good and isinstance(values, list) and values and all(map(_is_column, values))):
            raise DataError(
                "a codec is {'names': [...] or null, 'values': [[...], ...]}; this one is damaged"
            )
        return cls(None if names is None else tuple(names), tuple(tuple(v) for v in values))

    def _refuse(self, table: Table, d: int, codes_of_texts: np.ndarray) -> None:
        row = int(np.argmax(codes_of_texts[table.codes[:, d]] < 0))
        text = table.texts[d][table.codes[row, d]]
        place = f"{table.place(row)}, {self.column(d)}"
        if not text:
            raise empty_cell(place)
        hint = (
            f"; if this is a header, it should read {','.join(self.names)}" if row == 0 and self.names else ""
        )
        raise DataError(
            f"only known categories can be encoded: {place} holds {text!r}, which is none of "
            f"{shortened(self.values[d])}; drop the row, or have this category in the training data{hint}"
        )


def empty_cell(place: str) -> DataError:
    return DataError(
        f"every cell needs a value: {place} is empty; drop the row, or write a word for 'missing'"
    )


def narrow(categories: Sequence[int]) -> type[np.uint8] | type[np.int64]:
    """The type that data is kept in."""
    return np.uint8 if max(categories) <= 256 else np.int64


def shortened(values: Sequence[str | int], limit: int = 8) -> str:
    """The values for a message: a range as 0..K-1, a long list by its beginning."""
    if len(values) > 2 and list(values) == list(range(len(values))):
        return f"0..{len(values) - 1}"
    more = f", ... ({len(values)} in all)" if len(values) > limit else ""
    return ", ".join(repr(value) for value in values[:limit]) + more


def _is_column(values: Any) -> bool:
    """Whether these are distinct texts or distinct integers, and some."""
    if not isinstance(values, list) or {type(v) for v in values} not in ({str}, {int}):
        return False
    return len(set(values)) == len(values)


def _sorted_values(texts: list[str]) -> tuple[str, ...] | tuple[int, ...]:
    # '007' and '+7' are texts: as integers they could not be decoded to what the file held.
    if all(_is_plain_integer(text) for text in texts):
        return tuple(sorted(int(text) for text in texts))
    return tuple(sorted(texts))


def _is_plain_integer(text: str) -> bool:
    digits = text.removeprefix("-")
    return digits.isascii() and digits.isdigit() and (text == "0" or (digits[0] != "0"))


def _look_up(known: dict[str, int], values: Sequence[str | int], text: str) -> int:
    """The code of a cell, or -1. In a column of integers, '1.0' and '1e0' are 1."""
    if text in known or isinstance(values[0], str):
        return known.get(text, -1)
    try:
        number = float(text)
        return known.get(str(int(number)), -1) if number.is_integer() else -1
    except (ValueError, OverflowError):
        return -1
