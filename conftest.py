"""What pytest passes over: modules that need packages which are not installed, such as one of CUDA builds of PyTorch."""

import importlib.util

_NEEDS = {
    "src/xorflow/_cuda/triton_kernels.py": "triton",
    "tests/engines": "ray",
    "research/mixed/mostly.py": "mostlyai",
}
collect_ignore = [path for path, package in _NEEDS.items() if importlib.util.find_spec(package) is None]
