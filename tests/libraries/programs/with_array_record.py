import json
import subprocess
import sys

import numpy as np
import torch
from array_record.python.array_record_data_source import ArrayRecordDataSource
from array_record.python.array_record_module import ArrayRecordWriter
from torch.utils.data import DataLoader, Dataset


PATHS = [f"part-{part}.array_record" for part in range(3)]


class Decoded(Dataset):
    def __init__(self, source):
        self.source = source

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        return np.frombuffer(self.source[index], "f4").copy()


def write():
    for part, path in enumerate(PATHS):
        writer = ArrayRecordWriter(path, "group_size:1")
        for number in range(15 * part, 15 * part + 15):
            writer.write(np.full(4, number, "f4").tobytes())
        writer.close()


def main():
    # In its own process, because the writer starts threads. torch forks its workers, and these then crash.
    subprocess.run([sys.executable, __file__, "prepare"], check=True)
    torch.manual_seed(0)
    # With a range, the source does not open the file to count its records: readers start threads too.
    source = ArrayRecordDataSource([f"{path}[0:15]" for path in PATHS])
    loaders = {
        # The source itself has a length, `__getitem__` and `__getitems__`.
        "records": DataLoader(source, batch_size=8, shuffle=True, num_workers=2),
        "decoded": DataLoader(Decoded(source), batch_size=8, shuffle=True, num_workers=2),
    }
    for name, loader in loaders.items():
        for epoch in range(2):
            for batch in loader:
                values = [np.frombuffer(record, "f4").tolist() for record in batch] if name == "records" else batch.tolist()
                print(json.dumps({name: [epoch, values]}))


if __name__ == "__main__":
    write() if sys.argv[1:] == ["prepare"] else main()
