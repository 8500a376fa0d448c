//! Graphs: captured work that is launched as often as one likes.

use std::sync::{Arc, Mutex, PoisonError};

use phalanx_emulator_link::pointer::{Host, Out};

use crate::graph_memory::GraphMemory;
use crate::queue::Point;
use crate::status::{Result, Status, present};
use crate::task::Task;
use crate::world::world;

/// Each task with the nodes before it, which come earlier in the list.
type Nodes = Vec<(Arc<Task>, Vec<usize>)>;

/// A graph as it was captured.
#[derive(Debug)]
pub(crate) struct Graph {
    nodes: Nodes,
    memory: Arc<GraphMemory>,
}

/// A node of a graph, for those who count them.
#[derive(Debug)]
pub(crate) struct Node;

/// A graph that can be launched.
#[derive(Debug)]
pub(crate) struct Executable {
    nodes: Mutex<Nodes>,
    /// The end of its last launch, behind which the next one comes, and the chains of its branches.
    last: Mutex<(Point, Vec<u64>)>,
    memory: Mutex<Arc<GraphMemory>>,
    /// A launch frees what the one before left allocated.
    frees_first: bool,
}

impl Graph {
    pub(crate) fn new(nodes: Nodes, memory: GraphMemory) -> Graph {
        Graph { nodes, memory: Arc::new(memory) }
    }
}

fn instantiate(out: Out<usize>, graph: usize, flags: u64) -> Result<()> {
    // 1: free on launch, 2: upload, 4: from the device, 8: with the nodes' priorities.
    if flags & !0b1011 != 0 {
        return Err(Status::INVALID_VALUE.because(format!("flags of a graph {flags:#x}")));
    }
    let graph = world()?.graphs.get(graph)?;
    let (nodes, memory) = (Mutex::new(graph.nodes.clone()), Mutex::new(graph.memory.clone()));
    set!(
        out,
        world()?.executables.add(Arc::new(Executable {
            nodes,
            last: Mutex::default(),
            memory,
            frees_first: flags & 1 != 0
        }))
    )
}

fn launch(executable: usize, stream: usize) -> Result<()> {
    let world = world()?;
    let executable = world.executables.get(executable)?;
    let mut lanes = world.lanes();
    let lane = lanes.find(stream)?;
    if let Some(joined) = lanes.lane(lane)?.capture.clone() {
        lanes.invalidate(joined.capture);
        return Err(Status::NOT_SUPPORTED.because("a graph within a graph is not emulated"));
    }
    executable.memory.lock().unwrap_or_else(PoisonError::into_inner).launched(executable.frees_first)?;
    let nodes = executable.nodes.lock().unwrap_or_else(PoisonError::into_inner).clone();
    let mut last = executable.last.lock().unwrap_or_else(PoisonError::into_inner);
    let (end, branches) = &mut *last;
    *end = lanes.enqueue_graph(world, lane, &nodes, end, branches)?;
    drop((last, lanes));
    world.executor.added();
    Ok(())
}

/// What an update of an executable graph says about its end.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub(crate) struct UpdateInfo {
    result: i32,
    node: usize,
    from: usize,
}

fn update(executable: usize, graph: usize) -> Result<i32> {
    const TOPOLOGY_CHANGED: i32 = 2;
    let (executable, graph) = (world()?.executables.get(executable)?, world()?.graphs.get(graph)?);
    let mut nodes = executable.nodes.lock().unwrap_or_else(PoisonError::into_inner);
    let same = nodes.len() == graph.nodes.len() && nodes.iter().zip(&graph.nodes).all(|(a, b)| a.1 == b.1);
    if !same {
        return Ok(TOPOLOGY_CHANGED);
    }
    nodes.clone_from(&graph.nodes);
    *executable.memory.lock().unwrap_or_else(PoisonError::into_inner) = graph.memory.clone();
    Ok(0)
}

export! {
    @always {
        fn cuGraphDestroy(graph: usize) { world()?.graphs.remove(graph).map(|_| ()) }
        fn cuGraphExecDestroy(executable: usize) {
            let executable = world()?.executables.remove(executable)?;
            // What is queued of it still runs, and may use its memory.
            let last = executable.last.lock().unwrap_or_else(PoisonError::into_inner).0.clone();
            world()?.executor.wait(&last);
            Ok(())
        }
    }
    fn cuGraphInstantiateWithFlags(out: Out<usize>, graph: usize, flags: u64) { instantiate(out, graph, flags) }
    fn cuGraphInstantiate_v2(out: Out<usize>, graph: usize, node: Out<usize>, log: Host, bytes: usize) {
        instantiate(out, graph, 0)
    }
    fn cuGraphUpload(executable: usize, stream: usize) {
        let world = world()?;
        world.executables.get(executable)?;
        world.lanes().find(stream).map(|_| ())
    }
    fn cuGraphLaunch(executable: usize, stream: usize) { launch(executable, stream) }
    fn cuGraphExecUpdate_v2(executable: usize, graph: usize, info: Out<UpdateInfo>) {
        let result = update(executable, graph)?;
        present(info.set(UpdateInfo { result, node: 0, from: 0 }), "info")?;
        if result == 0 {
            return Ok(());
        }
        Err(Status::GRAPH_UPDATE_FAILURE.because("the graph has other nodes or edges than the executable one"))
    }
    fn cuGraphGetNodes(graph: usize, nodes: Out<usize>, count: Out<usize>) {
        let (world, graph) = (world()?, world()?.graphs.get(graph)?);
        if nodes.is_null() {
            return set!(count, graph.nodes.len());
        }
        let room = present(count.get(), "count")?.min(graph.nodes.len());
        for i in 0..room {
            present(nodes.set_at(i, world.nodes.add(Arc::new(Node))), "nodes")?;
        }
        set!(count, room)
    }
}
