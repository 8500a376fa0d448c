//! The plan of a backward pass: which nodes run, where their gradients go, and how many each still waits for.
//!
//! Every node gets a place, and every edge is resolved to the place it leads to, when the node is found. From then on
//! nothing is looked up.
//!
//! Gradients that meet are summed in the order of their origins, in which one thread sends them. Where several threads
//! do, a place has a [`Meeting`], which knows whom it awaits.

use std::sync::Arc;

use phalanx_tensor::Device;
use smallvec::SmallVec;

use super::job::Job;
use super::meeting::Meeting;
use super::numbers::Numbers;
use super::pending::{Pending, Rooms};
use super::task::{Arrival, Held, NodeGrads, Origin, Place, Ready, Targets, Task, origin};
use crate::node::{Edge, Node};
use crate::{Result, Var};

/// What will run.
pub(super) struct Plan<'g> {
    planned: Vec<Planned<'g>>,
    /// Every node's targets, one after the other.
    targets: Vec<Option<Place>>,
    places: Numbers,
    rooms: Rooms,
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
    /// Where those wait that have come.
    room: Option<u32>,
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

impl<'g> Plan<'g> {
    /// Everything that `job` reaches from the roots, which get the first places.
    pub(super) fn new(job: &Job, roots: &'g [Arc<Node>]) -> Plan<'g> {
        let mut plan = Plan {
            planned: Vec::new(),
            targets: Vec::new(),
            places: Numbers::default(),
            rooms: Rooms::default(),
            create_graph: job.create_graph(),
            meetings: Vec::new(),
            devices: SmallVec::new(),
        };
        for root in roots {
            plan.place_of(Held::Lent(root));
        }
        plan.explore(job, 0);
        plan
    }

    /// From now on gradients arrive in an order of chance.
    pub(super) fn expect_disorder(&mut self) {
        self.meet_targets_of(0);
    }

    /// Notes the origins of what the places from `new` on will send.
    fn meet_targets_of(&mut self, new: usize) {
        self.meetings.resize_with(self.planned.len(), Meeting::default);
        for place in new..self.planned.len() {
            let node = self.planned[place].node.clone();
            for (i, to) in Targets::from_slice(self.targets(place as Place)).into_iter().enumerate() {
                self.meet(to, origin(&node, i));
            }
        }
    }

    fn meet(&mut self, to: Option<Place>, from: Origin) {
        if let Some(to) = to {
            self.meetings[to as usize].expect(from);
        }
    }

    /// Adds a graph that was recorded during the pass and hangs on what is planned already; each of `entries` is
    /// where a gradient will come in from `node`, at the place returned.
    pub(super) fn extend(&mut self, job: &Job, node: &Node, entries: &[Edge]) -> Targets {
        let new = self.planned.len();
        let place = |edge: &Edge| job.passes(edge).then(|| self.place_of(Held::Own(Arc::clone(&edge.node))));
        let found: Targets = entries.iter().map(place).collect();
        self.explore(job, new);
        let found: Targets = found.into_iter().map(|to| self.expect(to)).collect();
        if !self.meetings.is_empty() {
            self.meet_targets_of(new);
            found.iter().enumerate().for_each(|(i, &to)| self.meet(to, origin(node, i)));
        }
        found
    }

    fn place_of(&mut self, node: Held<'g>) -> Place {
        let next = self.planned.len() as Place;
        let place = self.places.get_or_insert(node.id, next);
        if place == next {
            self.planned.push(Planned { node, targets: 0, waits: 0, room: None, wanted: true });
        }
        place
    }

    /// Finds what lies behind the places from `new` on, then counts what is waited for.
    fn explore(&mut self, job: &Job, new: usize) {
        let (mut at, first) = (new, self.targets.len());
        while at < self.planned.len() {
            let node = self.planned[at].node.clone();
            self.planned[at].targets = self.targets.len() as u32;
            match &node {
                Held::Lent(node) => self.resolve(job, &node.inputs, |edge| Held::Lent(&edge.node)),
                Held::Own(node) => self.resolve(job, &node.inputs, |edge| Held::Own(Arc::clone(&edge.node))),
            }
            at += 1;
        }
        if job.captures() {
            self.find_wanted(job, new);
        }
        for i in first..self.targets.len() {
            self.targets[i] = self.expect(self.targets[i]);
        }
        for planned in self.planned[new..].iter().filter(|p| p.wanted) {
            let device = planned.node.device();
            if !self.devices.contains(&device) {
                self.devices.push(device);
            }
        }
    }

    /// Notes where edges lead to.
    fn resolve<'e>(&mut self, job: &Job, edges: &'e [Option<Edge>], held: impl Fn(&'e Edge) -> Held<'g>) {
        for edge in edges {
            let target = edge.as_ref().filter(|edge| job.passes(edge)).map(|edge| self.place_of(held(edge)));
            self.targets.push(target);
        }
    }

    /// Counts one more gradient for a place, if its are wanted.
    fn expect(&mut self, to: Option<Place>) -> Option<Place> {
        let to = to.filter(|&to| self.planned[to as usize].wanted)?;
        self.planned[to as usize].waits += 1;
        Some(to)
    }

    /// Marks the nodes from which a captured value is reached. Inputs were recorded before what uses them, so in
    /// order of sequence numbers a node's inputs are decided before it.
    fn find_wanted(&mut self, job: &Job, new: usize) {
        let seq = |place: Place| self.planned[place as usize].node.seq;
        let mut order: Vec<(u64, Place)> =
            (new as Place..).take(self.planned.len() - new).map(|p| (seq(p), p)).collect();
        order.sort_unstable();
        for (_, place) in order {
            let reaches = |to: &Place| self.planned[*to as usize].wanted;
            let wanted = self.targets(place).iter().flatten().any(reaches)
                || job.is_captured(&self.planned[place as usize].node);
            self.planned[place as usize].wanted = wanted;
        }
    }

    fn targets(&self, place: Place) -> &[Option<Place>] {
        let planned = &self.planned[place as usize];
        &self.targets[planned.targets as usize..][..planned.node.inputs.len()]
    }

    pub(super) fn device(&self, place: Place) -> Device {
        self.planned[place as usize].node.device()
    }

    /// Whether one gradient is still to come, and no other came before.
    pub(super) fn is_sole(&self, place: Place) -> bool {
        let planned = &self.planned[place as usize];
        let met = self.meetings.get(place as usize).is_some_and(|meeting| meeting.len() > 1);
        planned.waits == 1 && planned.room.is_none() && !met
    }

    /// Gives a root its gradients; it may be ready.
    pub(super) fn begin(&mut self, place: Place, grads: NodeGrads) -> Option<Ready> {
        let planned = &mut self.planned[place as usize];
        planned.room = Some(self.rooms.enter(Pending::of(grads)));
        (planned.waits == 0).then(|| planned.ready(place))
    }

    /// Takes what arrives at a node, in the order of summation; it is ready with the last.
    pub(super) fn arrive(&mut self, place: Place, output: usize, grad: Arrival) -> Result<Option<Ready>> {
        let create_graph = self.create_graph;
        let planned = &mut self.planned[place as usize];
        planned.waits -= 1;
        if !matches!(grad, Arrival::Nothing) {
            planned.room(&mut self.rooms).take(output, grad, create_graph)?;
        }
        let planned = &self.planned[place as usize];
        Ok((planned.waits == 0).then(|| planned.ready(place)))
    }

    /// Takes what arrives at a node in an order of chance.
    pub(super) fn deposit(&mut self, place: Place, output: usize, from: Origin, grad: Arrival) -> Step {
        let planned = &mut self.planned[place as usize];
        planned.waits -= 1;
        if matches!(grad, Arrival::InBuffer) {
            planned.room(&mut self.rooms).in_buffer = true;
        }
        self.meetings[place as usize].arrive(from, output, grad);
        self.step(place)
    }

    /// Puts back what was summed.
    pub(super) fn settle(&mut self, place: Place, sum: Pending) -> Step {
        *self.planned[place as usize].room(&mut self.rooms) = sum;
        self.meetings[place as usize].summed();
        self.step(place)
    }

    fn step(&mut self, place: Place) -> Step {
        let planned = &mut self.planned[place as usize];
        match self.meetings[place as usize].due() {
            Some(parts) if !parts.is_empty() => {
                Step::Sum(std::mem::take(planned.room(&mut self.rooms)), parts)
            }
            Some(_) if planned.waits == 0 => Step::Ready(planned.ready(place)),
            _ => Step::Wait,
        }
    }

    /// A ready node, to be run.
    pub(super) fn start(&mut self, place: Place) -> Task<'g> {
        let targets = Targets::from_slice(self.targets(place));
        let planned = &mut self.planned[place as usize];
        let pending = planned.room.take().map(|room| self.rooms.leave(room));
        let pending = pending.unwrap_or_else(|| Pending::new(planned.node.outputs.len()));
        Task { node: planned.node.clone(), targets, pending }
    }
}

impl Planned<'_> {
    /// Where what has come waits.
    fn room<'r>(&mut self, rooms: &'r mut Rooms) -> &'r mut Pending {
        let outputs = self.node.outputs.len();
        let room = *self.room.get_or_insert_with(|| rooms.enter(Pending::new(outputs)));
        rooms.get(room)
    }

    fn ready(&self, place: Place) -> Ready {
        Ready { priority: self.node.priority(), id: self.node.id, place }
    }
}
