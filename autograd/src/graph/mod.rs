//! The graph that backward runs: its nodes and edges, and what they keep.
//!
//! ```text
//!     w (leaf) ----+
//!                  v
//!     x (leaf) -> mul -> sum -> loss        forward: results point at the node that made them
//!                  |      |
//!     x <---------mul <--sum <- backward    edges: a node points at the nodes of its inputs
//! ```
//! There is no tape. A result holds its node, and a node holds the nodes of its inputs. A node is dropped with the last
//! result or node that holds it.

pub(crate) mod hooks;
pub(crate) mod memory;
pub(crate) mod node;
pub(crate) mod rematerialized;
pub(crate) mod save_on_cpu;
pub(crate) mod saved_variable;
pub(crate) mod sequence;
