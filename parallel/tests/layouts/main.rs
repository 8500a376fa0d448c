//! Layout equality: a run has the same result under every layout.

mod case;
mod encoder_decoder;
mod encoders;
mod every;
mod experts;
mod families;
mod faults;
mod generation;
#[path = "../gpt/mod.rs"]
mod gpt;
mod moves;
mod outcome;
#[path = "../comm/port.rs"]
mod port;
mod run;
