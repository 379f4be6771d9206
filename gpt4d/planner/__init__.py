"""The planner: predicted time, bytes and memory of a step, and a search for the fastest grid."""
