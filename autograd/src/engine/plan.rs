//! The plan of a backward pass: which nodes run, where their gradients go, and how many each still waits for.
//!
//! Every node gets a place, and every edge is resolved to the place it leads to, when the node is found. From then on
//! nothing is looked up.
//!
//! Gradients that meet are summed in the order of their origins, in which one thread sends them. Where several threads
//! do, a place has a [`Meeting`], which knows whom it awaits.

use std::cell::Cell;
use std::ops::Range;
use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::job::Job;
use super::meeting::Meeting;
use super::numbers::Numbers;
use super::pending::Pending;
use super::task::{Arrival, Held, NodeGrads, Origin, Place, Ready, Targets, Task, origin};
use crate::node::{Edge, Node};
use crate::{Result, Var};

/// What will run.
pub(super) struct Plan<'g> {
    planned: Vec<Planned<'g>>,
    /// Every node's targets, one after the other.
    targets: Vec<Option<Place>>,
    places: Numbers,
    create_graph: bool,
    /// A place's, if gradients arrive in an order of chance; else there are none.
    meetings: Vec<Meeting>,
    /// Every device that a node runs on.
    pub(super) devices: SmallVec<[Device; 2]>,
}

struct Planned<'g> {
    node: Held<'g>,
    /// Where its targets begin.
    targets: u32,
    /// Gradients that it still waits for.
    waits: u32,
    /// Those that have come.
    pending: Pending,
    /// Whether a wanted gradient is reached from it.
    wanted: bool,
}

/// What is to be done after an arrival in an order of chance.
pub(super) enum Step {
    /// Nothing; others will come.
    Wait,
    /// Add to what has come already; then [`Plan::settle`].
    Sum(Pending, Vec<(usize, Var)>),
    /// Run the node.
    Ready(Ready),
}

thread_local! {
    /// Nodes of this thread's last pass: about as many as the next one's.
    static LAST: Cell<usize> = const { Cell::new(0) };
}

impl<'g> Plan<'g> {
    /// Everything that `job` reaches from the roots, which get the first places.
    pub(super) fn new(job: &Job, roots: &'g [Arc<Node>]) -> Plan<'g> {
        let mut plan = Plan {
            planned: Vec::with_capacity(LAST.get()),
            targets: Vec::with_capacity(2 * LAST.get()),
            places: Numbers::default(),
            create_graph: job.create_graph(),
            meetings: Vec::new(),
            devices: SmallVec::new(),
        };
        for root in roots {
            plan.place_of(Held::Lent(root));
        }
        plan.explore(job, 0);
        LAST.set(plan.planned.len());
        plan
    }

    /// From now on gradients arrive in an order of chance.
    pub(super) fn expect_disorder(&mut self) {
        self.meet_targets_of(0);
    }

    /// Notes the origins of what the places from `new` on will send.
    fn meet_targets_of(&mut self, new: usize) {
        self.meetings.resize_with(self.planned.len(), Meeting::default);
        for planned in &self.planned[new..] {
            for (i, to) in planned.targets().map(|at| self.targets[at]).enumerate() {
                meet(&mut self.meetings, to, origin(&planned.node, i));
            }
        }
    }

    /// Adds a graph that was recorded during the pass and hangs on what is planned already; each of `entries` is
    /// where a gradient will come in from `node`, at the place returned.
    pub(super) fn extend(&mut self, job: &Job, node: &Node, entries: &[Edge]) -> Targets {
        let new = self.planned.len();
        let place = |edge: &Edge| job.passes(edge).then(|| self.place_of(Held::Own(Arc::clone(&edge.node))));
        let mut found = Targets::of(entries.iter().map(place));
        self.explore(job, new);
        found.iter_mut().for_each(|to| *to = self.expect(*to));
        if !self.meetings.is_empty() {
            self.meet_targets_of(new);
            found.iter().enumerate().for_each(|(i, &to)| meet(&mut self.meetings, to, origin(node, i)));
        }
        found
    }

    #[inline]
    fn place_of(&mut self, node: Held<'g>) -> Place {
        let entry = self.places.entry(node.id);
        if let Some(place) = *entry {
            return place;
        }
        let place = Place::at(self.planned.len());
        *entry = Some(place);
        let pending = Pending::new(node.outputs.len());
        self.planned.push(Planned { node, targets: 0, waits: 0, pending, wanted: true });
        place
    }

    /// Finds what lies behind the places from `new` on, and counts what is waited for.
    fn explore(&mut self, job: &Job, new: usize) {
        let (mut at, mut last, mut latest_first) = (new, u64::MAX, true);
        while let Some(planned) = self.planned.get_mut(at) {
            planned.targets = self.targets.len() as u32;
            latest_first &= planned.node.seq < last;
            last = planned.node.seq;
            match &planned.node {
                &Held::Lent(node) => self.resolve(job, &node.inputs, |edge| Held::Lent(&edge.node)),
                Held::Own(node) => {
                    let node = Arc::clone(node);
                    self.resolve(job, &node.inputs, |edge| Held::Own(Arc::clone(&edge.node)));
                }
            }
            at += 1;
        }
        // Inputs were recorded before what uses them, so in order of sequence numbers a node's inputs are decided before it.
        if job.captures() && latest_first {
            (new..at).rev().for_each(|at| self.decide(job, at));
        } else if job.captures() {
            let mut order: Vec<usize> = (new..at).collect();
            order.sort_unstable_by_key(|&at| (self.planned[at].node.seq, at));
            order.into_iter().for_each(|at| self.decide(job, at));
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
    fn resolve<'e>(&mut self, job: &Job, edges: &'e [Option<Edge>], held: impl Fn(&'e Edge) -> Held<'g>) {
        for edge in edges {
            let mut to = None;
            if let Some(edge) = edge.as_ref().filter(|edge| job.passes(edge)) {
                let place = self.place_of(held(edge));
                // Else it is counted when it is known what is wanted.
                to = if job.captures() { Some(place) } else { self.expect(Some(place)) };
            }
            self.targets.push(to);
        }
    }

    /// Finds out whether a captured value is reached from a node, after those behind it.
    #[inline]
    fn decide(&mut self, job: &Job, at: usize) {
        let mut wanted = job.is_captured(&self.planned[at].node);
        for i in self.planned[at].targets() {
            self.targets[i] = self.expect(self.targets[i]);
            wanted |= self.targets[i].is_some();
        }
        self.planned[at].wanted = wanted;
    }

    /// Counts one more gradient for a place, if its are wanted.
    #[inline]
    fn expect(&mut self, to: Option<Place>) -> Option<Place> {
        let planned = &mut self.planned[to?.index()];
        planned.waits += u32::from(planned.wanted);
        to.filter(|_| planned.wanted)
    }

    pub(super) fn device(&self, place: Place) -> Device {
        self.planned[place.index()].node.device()
    }

    /// Whether one gradient is still to come, and no other came before.
    pub(super) fn is_sole(&self, place: Place) -> bool {
        let planned = &self.planned[place.index()];
        let met = self.meetings.get(place.index()).is_some_and(|meeting| meeting.len() > 1);
        planned.waits == 1 && planned.pending.is_empty() && !met
    }

    /// Gives a root its gradients; it may be ready.
    pub(super) fn begin(&mut self, place: Place, grads: NodeGrads) -> Option<Ready> {
        let planned = &mut self.planned[place.index()];
        planned.pending = Pending::of(grads);
        (planned.waits == 0).then(|| planned.ready(place))
    }

    /// Takes what arrives at a node, in the order of summation; it is ready with the last.
    #[inline(always)]
    pub(super) fn arrive(&mut self, place: Place, output: usize, grad: Arrival) -> Result<Option<Ready>> {
        let planned = &mut self.planned[place.index()];
        planned.waits -= 1;
        planned.pending.take(output, grad, self.create_graph)?;
        Ok((planned.waits == 0).then(|| planned.ready(place)))
    }

    /// Takes what arrives at a node in an order of chance.
    pub(super) fn deposit(&mut self, place: Place, output: usize, from: Origin, grad: Arrival) -> Step {
        let planned = &mut self.planned[place.index()];
        planned.waits -= 1;
        if matches!(grad, Arrival::InBuffer) {
            planned.pending.in_buffer = true;
        }
        self.meetings[place.index()].arrive(from, output, grad);
        self.step(place)
    }

    /// Puts back what was summed.
    pub(super) fn settle(&mut self, place: Place, sum: Pending) -> Step {
        self.planned[place.index()].pending = sum;
        self.meetings[place.index()].summed();
        self.step(place)
    }

    fn step(&mut self, place: Place) -> Step {
        let planned = &mut self.planned[place.index()];
        match self.meetings[place.index()].due() {
            Some(parts) if !parts.is_empty() => Step::Sum(std::mem::take(&mut planned.pending), parts),
            Some(_) if planned.waits == 0 => Step::Ready(planned.ready(place)),
            _ => Step::Wait,
        }
    }

    /// A ready node, to be run.
    #[inline(always)]
    pub(super) fn start(&mut self, place: Place) -> Task<'g> {
        let planned = &mut self.planned[place.index()];
        let targets = Targets::of(self.targets[planned.targets()].iter().copied());
        Task { node: planned.node.clone(), targets, pending: std::mem::take(&mut planned.pending) }
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
    fn ready(&self, place: Place) -> Ready {
        Ready { priority: self.node.priority(), id: self.node.id, place }
    }
}

fn meet(meetings: &mut [Meeting], to: Option<Place>, from: Origin) {
    if let Some(to) = to {
        meetings[to.index()].expect(from);
    }
}
