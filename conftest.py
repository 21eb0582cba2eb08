"""What pytest passes over: modules that need a package which only CUDA builds of PyTorch bring."""

import importlib.util

collect_ignore = [] if importlib.util.find_spec("triton") else ["src/xorflow/_cuda/triton_kernels.py"]
