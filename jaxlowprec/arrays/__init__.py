"""Quantised arrays: formats, codes and scales, and the layouts that GEMMs want."""
