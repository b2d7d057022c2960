"""Which memory counts as shared with forked children."""

from __future__ import annotations

from infeed.memory.mappings import user_mappings

MAPS = b"""\
7f00-7f10 rw-s 00000000 00:06 12                         /dev/nvidiactl
7f10-7f20 rw-s 00000000 00:01 13                         /dev/zero (deleted)
7f20-7f30 rw-s 00000000 00:19 14                         /dev/shm/pym-1-x (deleted)
7f30-7f40 rw-s 00000000 00:19 15                         /dev/shm/infeed.1.x.0
7f40-7f50 rw-s 00000000 00:01 16                         /memfd:infeed.x (deleted)
7f50-7f60 rw-s 00001000 00:06 17                         /data/a b
7f60-7f70 r--s 00000000 00:06 18                         /data/read only
7f70-7f80 rw-p 00000000 00:06 19                         /data/private
7f80-7f90 rw-p 00000000 00:00 0
"""


def test_writable_shared_memory_is_found_but_not_that_of_devices_and_of_infeed() -> None:
    found = [(mapping.begin, mapping.end, mapping.offset, mapping.inode, mapping.path) for mapping in user_mappings(MAPS)]
    assert found == [
        (0x7F10, 0x7F20, 0, 13, "/dev/zero (deleted)"),
        (0x7F20, 0x7F30, 0, 14, "/dev/shm/pym-1-x (deleted)"),
        (0x7F50, 0x7F60, 0x1000, 17, "/data/a b"),
    ]
