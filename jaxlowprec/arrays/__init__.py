"""What a quantised array is: its format, its codes and scales, and the layouts that GEMMs want."""
