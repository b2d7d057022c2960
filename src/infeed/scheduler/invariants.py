"""Checks of the scheduler's invariants; ``scheduler`` documents their numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from infeed.scheduler.messages import BatchId, SlotId, TaskId, WorkerId
from infeed.scheduler.records import Batch, SlotState, Task, Worker


def check(
    batches: Mapping[BatchId, Batch],
    tasks: Mapping[TaskId, Task],
    workers: Mapping[WorkerId, Worker],
    slots: Mapping[SlotId, SlotState],
    free: Sequence[SlotId],
    served: Sequence[WorkerId],
) -> None:
    """Raise ``AssertionError`` with the number of the violated invariant."""
    used: dict[SlotId, BatchId] = {}
    for task_id, task in tasks.items():
        assert task_id in workers[task.worker].tasks, f"I2: task {task_id}"
    for worker_id, worker in workers.items():
        assert all(tasks[task].worker == worker_id for task in worker.tasks), f"I2: worker {worker_id}"
        assert not worker.is_leaving or (worker.tasks and not worker.is_ready), f"I6: worker {worker_id}"
    for worker_id in served:
        assert workers[worker_id].is_ready, f"I6: worker {worker_id}"
    live = list(batches.values()) + [t.batch for t in tasks.values() if t.batch.is_abandoned]
    for batch in live:
        if batch.slot is not None:
            assert used.setdefault(batch.slot, batch.batch) == batch.batch, f"I3: slot {batch.slot}"
            assert slots[batch.slot] is SlotState.FILLING, f"I3: slot {batch.slot}"
        if not (batch.is_abandoned or batch.is_failed or batch.must_regroup):
            grains = sorted(
                grain
                for first, count in [
                    *batch.waiting,
                    *((t.first_grain, t.grain_count) for t in tasks.values() if t.batch is batch),
                ]
                for grain in range(first, first + count)
            )
            assert batch.task_count == sum(t.batch is batch for t in tasks.values()), f"I1: batch {batch.batch}"
            assert len(set(grains)) == len(grains), f"I1: batch {batch.batch}"
            assert len(grains) + batch.loaded_count == batch.grain_count, f"I1: batch {batch.batch}"
    assert sorted(free) == sorted(s for s, state in slots.items() if state is SlotState.FREE), "I3"
