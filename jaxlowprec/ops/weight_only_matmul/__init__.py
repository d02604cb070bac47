"""GEMM of activations in high precision with a quantised weight."""
