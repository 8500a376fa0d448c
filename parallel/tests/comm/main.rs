//! Communicators: the same programs over every backend, and what happens when a rank goes wrong.

mod elastic;
mod faults;
mod flight;
mod links;
mod mpi;
mod port;
mod processes;
mod suite;
mod threads;
mod training;
mod twin;
