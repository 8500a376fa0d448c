//! The differentiable operations: what each computes, what it saves for backward and why, and its derivative.
//!
//! An operation is a method of [`crate::Var`]. Its backward is written with these operations too, so that it can be
//! differentiated again; where a fused kernel is faster it is used unless a graph of the gradients is asked for.

mod add;
mod broadcast;
mod cat;
mod flip;
mod linear;
mod linear_map;
mod matmul;
mod mul;
mod pad;
mod permute;
mod reshape;
mod roll;
mod split;
mod subset;
mod sum;
mod tanh;
#[cfg(test)]
mod testing;
mod to_device;
mod tril;
