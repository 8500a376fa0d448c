//! Everything that reads or makes elements: every operation forward and backward.
