"""What a loader tells of itself: counters, the verdict, the timeline, the report, progress."""
