//! Indices on a GPU. One out of range is found by the kernel that uses it, and told at the next wait.

mod add;
mod order;
mod pick;

pub(in crate::ops) use add::add_to_planes;
pub(super) use add::{Rows, add_elements, add_rows};
pub(super) use pick::{elements, rows};
