//! Schedules as data, the simulator, and planning by PipeDream's dynamic program and by formulas. Nothing here runs a model.

mod asynchronous;
mod golden;
mod planning;
mod simulate;
mod transfers;
mod verify;
