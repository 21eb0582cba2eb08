"""One hypothesis profile for all tests: the same examples on every run, and no limit on a single one."""

from hypothesis import settings

settings.register_profile("xorflow", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("xorflow")
