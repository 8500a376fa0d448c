//! Checkpoints that many ranks write and any other number of them reads, under any other layout.
