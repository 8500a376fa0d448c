//! Schedules as data, the simulator, PipeDream's planner, and the formulas of the estimates. Nothing here runs a model.

mod asynchronous;
mod estimate;
mod golden;
mod planner;
mod properties;
mod receipts;
mod simulate;
mod text;
mod transfers;
mod verify;
