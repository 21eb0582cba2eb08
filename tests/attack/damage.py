"""What may happen to bytes, to JSON and to texts on their way: chance says which, and the damage says what it did."""

from __future__ import annotations

import copy
import json
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

Chance = random.Random

HUGE = "9" * 5000
"""More digits than Python reads."""

TEXTS = (
    *("", " ", "0", "-1", "1", "nan", "inf", "-inf", "1e999", "-0.0", HUGE, "9" * 25, "2147483648", "1e300"),
    *(
        "0x10",
        "1_000",
        "１２",
        "true",
        "none",
        "null",
        "\udcff\udcfe",
        "x" * 9000,
        "é🙂",
        "a\nb",
        "\x1b[31mred",
        "\u202eabc",
    ),
    *(
        "=",
        ":",
        ",",
        "+",
        "a=b",
        "a:b=c",
        "[bold]x[/bold]",
        "[/]",
        "%s%n",
        "{0}",
        "--",
        "-",
        "*",
        "'",
        '"',
        "\\",
    ),
    *(
        "/dev/zero",
        "/dev/full",
        "/dev/null",
        "/",
        ".",
        "..",
        "~",
        "/nowhere/x",
        "../../x.npy",
        "x" * 300 + ".csv",
        "\udcff.npy",
    ),
)
"""Texts that were not expected. None has a zero byte, which no argument of a command can."""

VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        -1,
        0,
        1,
        2**31,
        2**63,
        10**30,
        0.5,
        -0.0,
        1e308,
        float("nan"),
        float("inf"),
        float("-inf"),
    ),
    *(
        "",
        "x" * 5000,
        "\ud800",
        "\0",
        "../x",
        "/etc/passwd",
        "nan",
        [],
        {},
        [[]],
        [None],
        {"": None},
        [0] * 3000,
        [1, "a", None],
    ),
    *({"name": "made"}, {"name": "flow", "layers": []}, {"name": "os.system"}),
)
"""Values that JSON can hold, and none that was asked for."""


def damaged_bytes(content: bytes, chance: Chance) -> tuple[bytes, str]:
    """The content after one thing or two that disks, networks and editors do."""
    what = []
    for _ in range(chance.choice((1, 1, 1, 2))):
        name = chance.choice([*_BYTES])
        content = _BYTES[name](content, chance)
        what.append(name)
    return content, " and ".join(what)


def _place(content: bytes, chance: Chance) -> int:
    return chance.randrange(len(content) + 1)


def _truncated(content: bytes, chance: Chance) -> bytes:
    return content[: _place(content, chance)]


def flipped(content: bytes, chance: Chance) -> bytes:
    if not content:
        return content
    at = chance.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :]


def _cut_out(content: bytes, chance: Chance) -> bytes:
    first, last = sorted((_place(content, chance), _place(content, chance)))
    return content[:first] + content[last:]


def _repeated(content: bytes, chance: Chance) -> bytes:
    first, last = sorted((_place(content, chance), _place(content, chance)))
    return content[:last] + content[first:]


def _inserted(content: bytes, chance: Chance) -> bytes:
    at = _place(content, chance)
    extra = chance.choice(
        (b"\0", b"\xff", b"\r", b"\n\n", b'"', b",", b";", b"\xef\xbb\xbf", chance.randbytes(9))
    )
    return content[:at] + extra * chance.choice((1, 1, 1, 50)) + content[at:]


def _zeroed(content: bytes, chance: Chance) -> bytes:
    first, last = sorted((_place(content, chance), _place(content, chance)))
    return content[:first] + bytes(last - first) + content[last:]


def _digits(content: bytes, chance: Chance) -> bytes:
    """Some digit becomes a number of another kind."""
    places = [at for at, byte in enumerate(content) if 48 <= byte < 58]
    if not places:
        return content
    at = chance.choice(places)
    number = chance.choice((HUGE, "-1", "nan", "inf", "1e400", "0.5", "", "1.0", "2147483648", "9" * 20, "٣"))
    return content[:at] + number.encode() + content[at + 1 :]


_BYTES: dict[str, Callable[[bytes, Chance], bytes]] = {
    "truncated": _truncated,
    "bit flipped": flipped,
    "part cut out": _cut_out,
    "part repeated": _repeated,
    "bytes inserted": _inserted,
    "part zeroed": _zeroed,
    "another number": _digits,
    "other bytes": lambda content, chance: chance.randbytes(chance.randrange(1, 300)),
    "nothing": lambda content, chance: b"",
    "garbage at the end": lambda content, chance: content + chance.randbytes(chance.randrange(1, 40)),
    "latin-1": lambda content, chance: (
        content.decode("utf-8", "replace").encode("latin-1", "replace") + b"\xe9"
    ),
    "utf-16": lambda content, chance: content.decode("utf-8", "replace").encode("utf-16"),
}


def damaged_json(value: Any, chance: Chance) -> tuple[Any, str]:
    """A copy of a JSON value in which something, anywhere, is another value, missing, twice or too many."""
    value = copy.deepcopy(value)
    places = [place for place in _places(value, ()) if place]
    if not places:
        return chance.choice(VALUES), "all of it is another value"
    # each depth as often as any other, or long lists would take all cases
    depth = chance.choice(sorted({len(place) for place in places}))
    place = chance.choice([place for place in places if len(place) == depth])
    parent = value
    for key in place[:-1]:
        parent = parent[key]
    key, old = place[-1], parent[place[-1]]
    what = chance.choice(("value", "value", "value", "number", "missing", "more", "wrapped"))
    if what == "missing":
        del parent[key]
    elif what == "number" and isinstance(old, int | float) and not isinstance(old, bool):
        parent[key] = chance.choice((old + 1, old - 1, -old, old * 1000, float(old), old + 0.5, str(old)))
    elif what == "more" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(old))
    elif what == "more":
        parent[chance.choice(("magic", "version", "name", "", "of", "order"))] = chance.choice(VALUES)
    elif what == "wrapped":
        parent[key] = chance.choice(([old], {"name": old}, {"value": old}, str(old)))
    else:
        parent[key] = chance.choice(VALUES)
    return value, f"{what} at {'.'.join(map(str, place))}, which was {str(old)[:60]!r}"


def _places(value: Any, here: tuple[Any, ...]) -> list[tuple[Any, ...]]:
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    else:
        return [here]
    return [here, *(place for key, item in inner for place in _places(item, (*here, key)))]


def json_bytes(value: Any, chance: Chance) -> bytes:
    """The text of a JSON value, now and then with something that only texts can do."""
    text = json.dumps(value)
    extra = chance.randrange(40)
    if extra == 0:
        text = "[" * 3000 + text
    elif extra == 1:
        text = text.replace("{", '{"version": 6, "version": 5, ', 1)  # the same key twice
    elif extra == 2:
        text = f'{text[:-1]}, "magic": {HUGE}}}'
    return text.encode("utf-8", "surrogatepass")


def damaged_place(path: Path, chance: Chance) -> str:
    """Something else stands where a file was."""
    what = chance.choice(
        (
            "gone",
            "folder",
            "fifo",
            "link to itself",
            "link to zeros",
            "link outside",
            "link that dangles",
            "empty",
        )
    )
    content = path.read_bytes()
    path.unlink()
    if what == "folder":
        path.mkdir()
    elif what == "fifo":
        os.mkfifo(path)
    elif what == "link to itself":
        path.symlink_to(path.name)
    elif what == "link to zeros":
        path.symlink_to("/dev/zero")
    elif what == "link outside":
        outside = path.parent.parent / f"outside-{path.name}"
        outside.write_bytes(content)
        path.symlink_to(outside)
    elif what == "link that dangles":
        path.symlink_to("nowhere")
    elif what == "empty":
        path.touch()
    return what
