//! Every exported function by name, as `cuGetProcAddress` finds them.

use crate::{
    context, copy, device, event, fill, graph, host, launch, memory, module, occupancy, pool, stream,
};

/// The newest version of a function: programs ask for names without a version.
pub(crate) fn find(name: &str) -> Option<usize> {
    let versions = ["_v4", "_v3", "_v2", ""];
    versions.iter().find_map(|version| exported(&format!("{name}{version}")))
}

fn exported(name: &str) -> Option<usize> {
    let modules = [
        crate::world::function,
        context::function,
        device::function,
        memory::function,
        pool::function,
        host::function,
        copy::function,
        fill::function,
        stream::function,
        crate::capture::function,
        event::function,
        graph::function,
        module::function,
        crate::function::function,
        launch::function,
        occupancy::function,
        crate::pointer_query::function,
        crate::tensor_map::function,
    ];
    modules.iter().find_map(|function| function(name))
}
