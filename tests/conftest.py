"""One hypothesis profile for all tests: the same examples on every run, and no limit on a single one."""

import os
import signal

from hypothesis import settings

settings.register_profile("xorflow", deadline=None, derandomize=True, max_examples=50)
settings.load_profile("xorflow")

# scikit-learn skips some of its checks without it; SciPy reads it when it is imported
os.environ.setdefault("SCIPY_ARRAY_API", "1")

# a shell in the background starts its commands deaf to Ctrl-C, which some tests send
signal.signal(signal.SIGINT, signal.default_int_handler)
