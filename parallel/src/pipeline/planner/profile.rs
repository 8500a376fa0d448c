//! What the planner is told: [`Layer`]s and [`Level`]s.

/// A layer, as measured with one micro-batch on one worker.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Layer {
    /// Of the forward and the backward pass together, in seconds (or any unit, the same everywhere).
    pub time: f64,
    /// Bytes of its output, which are those of its gradient too.
    pub activation_bytes: f64,
    /// Bytes of its parameters.
    pub parameter_bytes: f64,
}

/// A level of the machine: the lowest connects workers, each further one connects groups of the level beneath.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Level {
    /// How many workers, or groups of the level beneath, a group has.
    pub width: usize,
    /// Bytes a second between two of them.
    pub bandwidth: f64,
}
