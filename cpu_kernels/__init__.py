"""Native kernels for CPUs (C++, called through XLA's FFI) behind the operations of `pallas_kernels.reference`."""
