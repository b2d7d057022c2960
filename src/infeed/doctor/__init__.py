"""``infeed doctor``: watches a program that loads data, looks at its datasets, and says what is wrong."""
