"""GEMM of quantised operands."""
