"""The status board: written by workers, read from the other side."""

from __future__ import annotations

import mmap
import time

from infeed.memory.segments import open_reader, open_store
from infeed.scheduler.messages import TaskId, WorkerId
from infeed.workers.process_tools import MemoryUse
from infeed.workers.status import UNKNOWN, Cell, StatusBoard

W0, W1 = WorkerId(0), WorkerId(1)


def test_the_status_of_a_worker_is_read_through_shared_memory() -> None:
    store = open_store()
    status_board = StatusBoard((W0, W1), store)
    status_board.clear(W1)
    assert status_board.handle is not None
    memory: mmap.mmap = open_reader(store.descriptor()).attach(status_board.handle)
    cell = Cell.over(memory, 1)
    before = time.perf_counter_ns()
    assert status_board.doing(W1).task is None
    assert status_board.doing(W1).since_ns <= before

    cell.begin(TaskId(0))
    assert (status_board.doing(W1).task, status_board.doing(W1).exact_row) == (0, None)
    cell.at(7)
    assert status_board.doing(W1).exact_row == 7
    assert before <= status_board.doing(W1).since_ns <= time.perf_counter_ns()
    cell.among(8, 4)
    assert (status_board.doing(W1).row, status_board.doing(W1).row_count, status_board.doing(W1).exact_row) == (8, 4, None)
    cell.note_usage(MemoryUse(123, 12), 456, 789)
    cell.rest()
    assert (status_board.doing(W1).task, status_board.doing(W1).since_ns, status_board.doing(W1).rss_bytes) == (None, 0, 123)
    assert (status_board.doing(W1).cpu_ns, status_board.doing(W1).queued_ns) == (456, 789)
    assert status_board.doing(W0).since_ns == 0

    status_board.clear(W1)
    assert (status_board.doing(W1).rss_bytes, status_board.doing(W1).stack_fd) == (0, UNKNOWN)
    del cell
    status_board.close()
    store.close()


def test_threads_share_a_status_board_in_their_own_memory() -> None:
    status_board = StatusBoard((W0,), None)
    status_board.cell(W0).begin(TaskId(5))
    assert status_board.doing(W0).task == 5
    status_board.close()
