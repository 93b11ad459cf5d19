"""The kernel language: Python that writes SIMD kernels. It knows nothing of attention."""
