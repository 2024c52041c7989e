"""GPU kernels in Triton, each beside a plain PyTorch twin that says what it computes.

An operation ``op`` comes as three functions: ``op_plain`` (PyTorch; the oracle of the tests, and what other devices
run), ``op_triton`` (the kernel) and ``op`` (picks one by the device of its tensors). All of them write into tensors
that the caller gives and keeps, so that a CUDA graph can replay them. Activations are float32 or bfloat16; arithmetic
is float32, and results are rounded once.
"""
