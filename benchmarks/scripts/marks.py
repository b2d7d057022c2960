import time


def mark(name):
    """Print when the program has reached a point; `benchmarks/programs.py` reads it."""
    print(f"mark {name} {time.time()}", flush=True)
