"""Flower's own helper: the weighted mean of the clients' arrays in memory, as its FedAvg calls it.

    FLOWER_ENVIRONMENT/bin/python flower_aggregate.py --parameters 10000000 --clients 4 --rounds 3

Prints {"version": ..., "seconds": [one a round]}. The arrays are made before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import time
from importlib.metadata import version

TENSORS = 16


def main() -> None:
    import numpy as np
    from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
    from flwr.serverapp.strategy.strategy_utils import aggregate_arrayrecords

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--parameters", type=int, required=True)
    parser.add_argument("--clients", type=int, required=True)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    size = options.parameters // TENSORS

    def record(client: int) -> RecordDict:
        random = np.random.default_rng(client)
        arrays = {f"t{n}": Array(random.standard_normal(size, np.float32)) for n in range(TENSORS)}
        metrics = MetricRecord({"num-examples": client + 1})
        return RecordDict({"arrays": ArrayRecord(arrays), "metrics": metrics})

    records = [record(client) for client in range(options.clients)]
    seconds = []
    for _ in range(options.rounds):
        began = time.perf_counter()
        aggregate_arrayrecords(records, "num-examples")
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"version": version("flwr"), "seconds": seconds}))


if __name__ == "__main__":
    main()
