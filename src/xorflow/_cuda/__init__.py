"""All that runs on CUDA alone: Triton kernels, training steps and decoding as CUDA graphs.

The rest asks `devices` whether there is a faster way for a tensor, and has a plain one of its own: without this package's
answers everything works, slower.
"""
