//! Schedules as data, the simulator, PipeDream's planner, and the formulas of the estimates. Nothing here runs a model.

mod asynchronous;
mod golden;
mod planning;
mod simulate;
mod transfers;
mod verify;
