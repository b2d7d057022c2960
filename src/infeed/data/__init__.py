"""Sharded datasets on disk or object storage: ``infeed.open`` makes tar shards and Parquet files map-style datasets."""
