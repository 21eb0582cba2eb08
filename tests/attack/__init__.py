"""Attacks on every door of xorflow: seeded cases, and the one rule that all of them check.

A case either ends well, with a result that is right, or is refused in one line; never a traceback, a hang, a file overwritten
or an input changed. `rule` says so in code, `DOORS` in `doors` lists where cases come in, and each is made again from the seed,
the name of the door and its number: `python -m attack --seed 0 --door npy --case 17`, from the folder of the tests.
"""
