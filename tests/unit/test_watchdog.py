"""The error for ``timeout``: what each worker is doing, where, and which workers wait for resources."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from infeed.engine.watchdog import HangLimits, Watchdog
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.status import StatusBoard

WORKERS = (WorkerId(0), WorkerId(1), WorkerId(2))


def test_the_timeout_error_names_nodes_and_workers_without_a_place() -> None:
    """Worker 0 is starting, worker 1 has not begun its task, and Ray has not started worker 2."""
    pool: Any = SimpleNamespace(
        place_of=lambda worker: "" if worker == 2 else f" on node 10.0.0.{worker}",
        stack_of=lambda worker, stack_fd: None,
        missing=lambda: "Ray has not started 1 of 3 workers; each needs 1 CPU (0 of 2 free)",
    )
    board = StatusBoard(WORKERS, None)
    board.cell(WorkerId(0)).start(-1)
    tasks: Any = {TaskId(5): SimpleNamespace(worker=WorkerId(1))}

    text = str(Watchdog(pool, board, WORKERS, HangLimits()).timeout_error(2.0, tasks))

    assert "timeout=2 s exceeded without a batch" in text
    assert "worker 0 on node 10.0.0.0 has been starting (building the dataset, or in worker_init_fn) for 0.0 s" in text
    assert "worker 1 on node 10.0.0.1 has not started its task" in text
    assert text.endswith("; Ray has not started 1 of 3 workers; each needs 1 CPU (0 of 2 free)")
