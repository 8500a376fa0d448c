//! Random programs with random faults.
