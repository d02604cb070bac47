"""Sums over devices in fewer bits than float32."""
