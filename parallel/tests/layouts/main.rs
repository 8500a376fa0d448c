//! Layout equality: whatever a run is laid out over, it is the same run.

mod case;
mod every;
mod faults;
#[path = "../gpt/mod.rs"]
mod gpt;
mod moves;
mod outcome;
mod run;
