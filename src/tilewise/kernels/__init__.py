"""The kernels of exact attention, one page each, in the words of `tilewise.simd`."""
