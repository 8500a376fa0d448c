//! The graph, through its public interface only: the engine on one device and on several, hooks, leaves and their
//! slots, split passes, ordering without data, recomputation.

#[path = "autograd/checkpoint.rs"]
mod checkpoint;
#[path = "autograd/engine.rs"]
mod engine;
#[path = "autograd/leaves_and_hooks.rs"]
mod leaves_and_hooks;
#[path = "autograd/order.rs"]
mod order;
#[path = "autograd/support.rs"]
mod support;
