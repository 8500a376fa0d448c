//! Communicators: the same programs over every backend, and what happens when a rank goes wrong.

#[path = "comm/faults.rs"]
mod faults;
#[path = "comm/fuzz.rs"]
mod fuzz;
#[path = "comm/mpi.rs"]
mod mpi;
#[path = "comm/observed.rs"]
mod observed;
#[path = "comm/port.rs"]
mod port;
#[path = "comm/processes.rs"]
mod processes;
#[path = "comm/program.rs"]
mod program;
#[path = "comm/suite.rs"]
mod suite;
#[path = "comm/threads.rs"]
mod threads;
#[path = "comm/training.rs"]
mod training;
#[path = "comm/twin.rs"]
mod twin;
