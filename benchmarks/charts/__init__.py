"""Charts of the results as SVG files: the same bytes from the same results, whatever is installed."""

from charts import growth, kept, kernels, overview, peers, programs, training

CHARTS = {
    "speed": overview.overview,
    "peers": peers.peers,
    "quantizers": kernels.quantizers,
    "matmuls": kernels.matmuls,
    "weight_only": kernels.weight_only,
    "experts": kernels.experts,
    "conversion": programs.conversion,
    "training_step": programs.training_step,
    "weight_sync": programs.weight_sync,
    "mesh": programs.mesh,
    "traffic": programs.traffic,
    "growth": growth.growth,
    "kept": kept.kept,
    "training_frontier": training.frontier,
    "training_gap": training.every_length,
    "training_gap_longest": training.longest,
}  # the name of a file in docs/pictures -> what draws it
