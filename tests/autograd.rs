//! The graph, through its public interface only: the engine on one device and on several, hooks, leaves and their
//! slots, split passes, ordering without data, recomputation.

#[path = "autograd/checkpoint.rs"]
mod checkpoint;
#[path = "autograd/checkpoint_memory.rs"]
mod checkpoint_memory;
#[path = "autograd/dependency.rs"]
mod dependency;
#[path = "autograd/devices.rs"]
mod devices;
#[path = "autograd/engine.rs"]
mod engine;
#[path = "autograd/hooks.rs"]
mod hooks;
#[path = "autograd/leaves.rs"]
mod leaves;
#[path = "autograd/split.rs"]
mod split;
#[path = "autograd/support.rs"]
mod support;
