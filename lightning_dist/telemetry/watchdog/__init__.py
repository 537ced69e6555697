"""A side process for each rank that sees the run stall or crash. What runs in it imports the standard library only."""
