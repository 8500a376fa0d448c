//! The plan of a backward pass: which nodes run, where their gradients go, and how many each still waits for.
//!
//! Every node gets an index when it is found, and each of its edges is resolved to the index of the node it leads to.
//! From then on nothing is looked up. Where several threads send gradients, every node has a [`ReorderBuffer`] too.

use std::cell::Cell;
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::graph_task::{GraphTask, NodeIndex, NodeRef, NodeTask, Ready, Targets};
use super::input_buffer::{Arrival, InputBuffer, ReorderBuffer, Sender};
use crate::graph::node::{Edge, Node, NodeGrads};
use crate::{Result, Var};

/// The nodes of one backward pass, with their targets, counts and input buffers.
pub(super) struct Plan<'g> {
    planned: Vec<Planned<'g>>,
    /// Every node's targets, one after the other.
    targets: Vec<Option<NodeIndex>>,
    indices: NodeMap,
    create_graph: bool,
    /// One for each node if several threads send gradients, else none.
    reorder: Vec<ReorderBuffer>,
    /// Every device that a node runs on.
    pub(super) devices: SmallVec<[Device; 2]>,
}

struct Planned<'g> {
    node: NodeRef<'g>,
    /// Where its targets begin.
    targets: u32,
    /// Gradients that it still waits for.
    waits: u32,
    /// The gradients that have arrived, added.
    buffer: InputBuffer,
    /// Whether a wanted gradient is reachable from this node (else the node is skipped).
    wanted: bool,
}

/// What a worker does next after it has sent a gradient, in a pass with several workers.
pub(super) enum Step {
    /// Nothing; others will come.
    Wait,
    /// Add to what has come already; then [`Plan::settle`].
    Sum(InputBuffer, Vec<(usize, Var)>),
    /// Run the node.
    Ready(Ready),
}

thread_local! {
    /// Nodes of this thread's last pass: about as many as the next one's.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

impl<'g> Plan<'g> {
    /// Everything that `task` reaches from the roots, which get the first indices.
    pub(super) fn new(task: &GraphTask, roots: &'g [Arc<Node>]) -> Plan<'g> {
        let mut plan = Plan {
            planned: Vec::with_capacity(LAST.get()),
            targets: Vec::with_capacity(2 * LAST.get()),
            indices: NodeMap::default(),
            create_graph: task.create_graph(),
            reorder: Vec::new(),
            devices: SmallVec::new(),
        };
        for root in roots {
            plan.index_of(NodeRef::Borrowed(root));
        }
        plan.explore(task, 0);
        LAST.set(plan.planned.len());
        plan
    }

    /// From now on several threads send gradients, in any order.
    pub(super) fn expect_several_threads(&mut self) {
        self.expect_senders_of(0);
    }

    /// Notes the senders of what the nodes from `new` on will send.
    fn expect_senders_of(&mut self, new: usize) {
        self.reorder.resize_with(self.planned.len(), ReorderBuffer::default);
        for planned in &self.planned[new..] {
            for (i, to) in planned.targets().map(|at| self.targets[at]).enumerate() {
                expect_sender(&mut self.reorder, to, Sender::new(&planned.node, i));
            }
        }
    }

    /// Adds a graph that was recorded during the pass and hangs on what is planned already; each of `entries` is
    /// where a gradient will come in from `node`, at the index returned.
    pub(super) fn extend(&mut self, task: &GraphTask, node: &Node, entries: &[Edge]) -> Targets {
        let new = self.planned.len();
        let index = |edge: &Edge| {
            task.passes(node, edge).then(|| self.index_of(NodeRef::Owned(Arc::clone(&edge.node))))
        };
        let mut found = Targets::of(entries.iter().map(index));
        self.explore(task, new);
        found.iter_mut().for_each(|to| *to = self.expect(*to));
        if !self.reorder.is_empty() {
            self.expect_senders_of(new);
            found
                .iter()
                .enumerate()
                .for_each(|(i, &to)| expect_sender(&mut self.reorder, to, Sender::new(node, i)));
        }
        found
    }

    #[inline]
    fn index_of(&mut self, node: NodeRef<'g>) -> NodeIndex {
        let entry = self.indices.entry(node.id);
        if let Some(index) = *entry {
            return index;
        }
        let index = NodeIndex::at(self.planned.len());
        *entry = Some(index);
        let buffer = InputBuffer::new(node.outputs.len());
        self.planned.push(Planned { node, targets: 0, waits: 0, buffer, wanted: true });
        index
    }

    /// Finds what lies behind the nodes from `new` on, and counts what is waited for.
    fn explore(&mut self, task: &GraphTask, new: usize) {
        let (mut at, mut last, mut latest_first) = (new, u64::MAX, true);
        while let Some(planned) = self.planned.get_mut(at) {
            planned.targets = self.targets.len() as u32;
            latest_first &= planned.node.seq < last;
            last = planned.node.seq;
            match &planned.node {
                &NodeRef::Borrowed(node) => self.resolve(task, node, |edge| NodeRef::Borrowed(&edge.node)),
                NodeRef::Owned(node) => {
                    let node = Arc::clone(node);
                    self.resolve(task, &node, |edge| NodeRef::Owned(Arc::clone(&edge.node)));
                }
            }
            at += 1;
        }
        // Inputs were recorded before what uses them, so in order of sequence numbers a node's inputs are decided
        // before it.
        if task.captures() && latest_first {
            (new..at).rev().for_each(|at| self.decide(task, at));
        } else if task.captures() {
            let mut order: Vec<usize> = (new..at).collect();
            order.sort_unstable_by_key(|&at| (self.planned[at].node.seq, at));
            order.into_iter().for_each(|at| self.decide(task, at));
        }
        for planned in self.planned[new..].iter().filter(|p| p.wanted) {
            let device = planned.node.device();
            if self.devices.last() != Some(&device) && !self.devices.contains(&device) {
                self.devices.push(device);
            }
        }
    }

    /// Notes where edges lead to.
    #[inline]
    fn resolve<'e>(&mut self, task: &GraphTask, node: &'e Node, held: impl Fn(&'e Edge) -> NodeRef<'g>) {
        for edge in &*node.inputs {
            let mut to = None;
            if let Some(edge) = edge.as_ref().filter(|edge| task.passes(node, edge)) {
                let index = self.index_of(held(edge));
                // In `grad()` edges are counted later (`decide`), when it is known which nodes lead to a wanted input.
                to = if task.captures() { Some(index) } else { self.expect(Some(index)) };
            }
            self.targets.push(to);
        }
    }

    /// Decides whether a node leads to an input of `grad()`. Its inputs must have been decided before.
    #[inline]
    fn decide(&mut self, task: &GraphTask, at: usize) {
        let mut wanted = task.is_captured(&self.planned[at].node);
        for i in self.planned[at].targets() {
            self.targets[i] = self.expect(self.targets[i]);
            wanted |= self.targets[i].is_some();
        }
        self.planned[at].wanted = wanted;
    }

    /// Counts one more gradient for a node, if its are wanted.
    #[inline]
    fn expect(&mut self, to: Option<NodeIndex>) -> Option<NodeIndex> {
        let planned = &mut self.planned[to?.index()];
        planned.waits += u32::from(planned.wanted);
        to.filter(|_| planned.wanted)
    }

    pub(super) fn device(&self, index: NodeIndex) -> Device {
        self.planned[index.index()].node.device()
    }

    /// Whether one gradient is still to come, and no other came before.
    pub(super) fn is_sole(&self, index: NodeIndex) -> bool {
        let planned = &self.planned[index.index()];
        let met = self.reorder.get(index.index()).is_some_and(|buffer| buffer.len() > 1);
        planned.waits == 1 && planned.buffer.is_empty() && !met
    }

    /// Gives a root its gradients; it may be ready.
    pub(super) fn begin(&mut self, index: NodeIndex, grads: NodeGrads) -> Option<Ready> {
        let planned = &mut self.planned[index.index()];
        planned.buffer = InputBuffer::of(grads);
        (planned.waits == 0).then(|| planned.ready(index))
    }

    /// Takes what arrives at a node, in the order of summation; it is ready with the last.
    #[inline(always)]
    pub(super) fn arrive(
        &mut self,
        index: NodeIndex,
        output: usize,
        arrival: Arrival,
    ) -> Result<Option<Ready>> {
        let planned = &mut self.planned[index.index()];
        planned.waits -= 1;
        planned.buffer.take(output, arrival, self.create_graph)?;
        Ok((planned.waits == 0).then(|| planned.ready(index)))
    }

    /// Takes what arrives at a node from one of several threads.
    pub(super) fn deposit(
        &mut self,
        index: NodeIndex,
        output: usize,
        from: Sender,
        arrival: Arrival,
    ) -> Step {
        let planned = &mut self.planned[index.index()];
        planned.waits -= 1;
        if matches!(arrival, Arrival::InLeaf) {
            planned.buffer.in_leaf = true;
        }
        self.reorder[index.index()].arrive(from, output, arrival);
        self.step(index)
    }

    /// Puts back what was summed.
    pub(super) fn settle(&mut self, index: NodeIndex, sum: InputBuffer) -> Step {
        self.planned[index.index()].buffer = sum;
        self.reorder[index.index()].summed();
        self.step(index)
    }

    fn step(&mut self, index: NodeIndex) -> Step {
        let planned = &mut self.planned[index.index()];
        match self.reorder[index.index()].due() {
            Some(parts) if !parts.is_empty() => Step::Sum(std::mem::take(&mut planned.buffer), parts),
            Some(_) if planned.waits == 0 => Step::Ready(planned.ready(index)),
            _ => Step::Wait,
        }
    }

    /// A ready node, to be run.
    #[inline(always)]
    pub(super) fn start(&mut self, index: NodeIndex) -> NodeTask<'g> {
        let planned = &mut self.planned[index.index()];
        let targets = Targets::of(self.targets[planned.targets()].iter().copied());
        NodeTask { node: planned.node.clone(), targets, buffer: std::mem::take(&mut planned.buffer) }
    }
}

impl Planned<'_> {
    /// Which of the plan's targets are its.
    #[inline]
    fn targets(&self) -> Range<usize> {
        let first = self.targets as usize;
        first..first + self.node.inputs.len()
    }

    #[inline]
    fn ready(&self, index: NodeIndex) -> Ready {
        Ready { priority: self.node.priority(), id: self.node.id, index }
    }
}

fn expect_sender(reorder: &mut [ReorderBuffer], to: Option<NodeIndex>, from: Sender) {
    if let Some(to) = to {
        reorder[to.index()].expect(from);
    }
}

/// The indices of nodes in the plan, by their ids. (Not by their addresses: recomputed nodes come and go. Not by their
/// sequence numbers: two recomputations of one checkpoint have the same.) A graph's ids are almost consecutive, so the
/// table has pages, of which the last one used is mostly the next one used.
#[derive(Default)]
pub(super) struct NodeMap {
    pages: Vec<[Option<NodeIndex>; PAGE as usize]>,
    index: HashMap<u64, usize>,
    /// Number and index of the page used last; meaningless while there is none.
    last: (u64, usize),
}

const PAGE: u64 = 64;

impl NodeMap {
    /// The entry of an id.
    #[inline]
    pub(super) fn entry(&mut self, id: u64) -> &mut Option<NodeIndex> {
        let page = id / PAGE;
        if self.last.0 != page || self.pages.is_empty() {
            self.find(page);
        }
        &mut self.pages[self.last.1][(id % PAGE) as usize]
    }

    #[inline(never)]
    fn find(&mut self, page: u64) {
        let at = *self.index.entry(page).or_insert(self.pages.len());
        if at == self.pages.len() {
            self.pages.push([None; PAGE as usize]);
        }
        self.last = (page, at);
    }
}
