"""``infeed doctor``: monitors a program that loads data, probes its datasets and reports problems."""
