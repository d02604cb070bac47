"""The parts of the soak of weight sync: processes, faults, and what has to hold. See soak_weight_sync."""
