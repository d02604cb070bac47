"""Schemes with one code of 8 bits per element and float scales: of tiles, of whole tensors, of rows."""
