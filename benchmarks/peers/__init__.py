"""Other frameworks on our workloads, each with its own machinery and set up to be at its best.

Their settings in the environment are read when they are imported, so they stand here.
"""

import os

CORES = 2  # that a peer may use, in processes or threads

os.environ |= {
    "FLWR_TELEMETRY_ENABLED": "0",
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_prestart_worker_first_driver": "0",  # workers that Flower's actors could not use
    "PFL_PYTORCH_DEVICE": "cpu",  # or pfl looks for a GPU at every batch
}
