//! Gathers and reduce-scatters overlap with computing, by the order of events and not by time.
//!
//! Rank 1 starts a call that rank 0 prefetches only when rank 0 is computing the unit before. Rank 0 computes that unit until the call has
//! ended. So rank 0 starts the call before it computes the unit, and waits for it after; in any other order both ranks would wait for ever.
//! The same holds for the reduce-scatter of the unit whose gradients were computed last.

use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

use phalanx_nn::autograd::{self, Cx, Function, Grads, SavedVariable, Var, grads1};
use phalanx_nn::{Group, Linear, LinearConfig, Module, Rule, Scope, Sgd, WrappedUnit, parameters};
use phalanx_parallel::Result;
use phalanx_parallel::comm::{self, Call, CollectiveKind, Comm, Communicator, Pending, Traffic, observed};
use phalanx_parallel::launch::{Rank, Threads};
use phalanx_parallel::sharded::{Reshard, Zero, ZeroConfig, ZeroStage};
use phalanx_tensor::{DType, Tensor};

use crate::STAGES;

const UNITS: usize = 4;
/// Far more than an exchange takes on a busy machine.
const LONG: Duration = Duration::from_secs(20);

/// Calls of a rank: gathers and reduce-scatters.
type Calls = [usize; 2];

/// What both ranks have done.
#[derive(Default)]
struct State {
    /// Whether a rank's calls count: those of the pass do.
    counts: [bool; 2],
    /// Whether a rank has waited in vain; no rank waits from then on.
    late: bool,
    /// Units that rank 0 has begun to compute, forward and backward.
    computed: usize,
    /// Calls that each rank has started, and those of rank 0 that have ended.
    started: [Calls; 2],
    ended: Calls,
    /// For each unit that rank 0 computes, the calls that it had started before, and those that had ended when it went on.
    seen: Vec<[Calls; 2]>,
}

#[derive(Default)]
struct Events {
    state: Mutex<State>,
    changed: Condvar,
}

/// The number of gathers among [`Calls`].
const GATHERS: usize = 0;

/// Gathers and reduce-scatters have a number, others have none.
fn place(kind: CollectiveKind) -> Option<usize> {
    [CollectiveKind::AllGather, CollectiveKind::ReduceScatter].iter().position(|known| *known == kind)
}

impl Events {
    /// Changes the state, and then waits until it is as `until` says; not for ever, so that a wrong order is seen and does not hang.
    fn note(&self, change: impl FnOnce(&mut State), until: impl Fn(&State) -> bool) {
        let mut state = self.state.lock().unwrap();
        change(&mut state);
        self.changed.notify_all();
        let waits = |state: &mut State| !state.late && !until(state);
        let (mut state, outcome) = self.changed.wait_timeout_while(state, LONG, waits).unwrap();
        state.late |= outcome.timed_out();
        self.changed.notify_all();
    }

    /// A rank computes a unit. Rank 0 goes on when the calls that overlap with it have ended.
    fn computes(&self, rank: usize, overlapping: &[Calls]) {
        if rank > 0 || !self.state.lock().unwrap().counts[0] {
            return;
        }
        let number = self.state.lock().unwrap().computed;
        let before = self.state.lock().unwrap().started[0];
        self.note(|state| state.computed += 1, |state| state.ended == overlapping[number]);
        let mut state = self.state.lock().unwrap();
        let after = state.ended;
        state.seen.push([before, after]);
    }
}

/// A communicator that tells of each start. Rank 1 starts what overlaps with a unit of rank 0's when that is being computed.
#[derive(Clone)]
struct Told {
    comm: Comm,
    rank: usize,
    /// Whether this is the rank that starts calls late. Without prefetch a unit's gather would wait behind such a call.
    holds: bool,
    events: Arc<Events>,
    overlapping: Arc<Vec<Calls>>,
}

impl std::fmt::Debug for Told {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.comm.fmt(f)
    }
}

impl Communicator for Told {
    fn rank(&self) -> usize {
        self.comm.rank()
    }
    fn ranks(&self) -> &[usize] {
        self.comm.ranks()
    }
    fn start(&self, call: Call) -> Pending {
        let counts = |_: &usize| self.events.state.lock().unwrap().counts[self.rank];
        if let Some(place) = place(call.kind()).filter(counts) {
            let number = self.events.state.lock().unwrap().started[self.rank][place];
            // The unit during which the call is to end. A unit does not overlap with its own gather.
            let unit = self.overlapping.iter().position(|ended| ended[place] > number);
            let unit = unit.filter(|unit| place != GATHERS || *unit < number);
            let may = |state: &State| !self.holds || unit.is_none_or(|unit| state.computed > unit);
            self.events.note(|state| state.started[self.rank][place] += 1, may);
        }
        self.comm.start(call)
    }
    fn group(&self, ranks: &[usize]) -> comm::Result<Comm> {
        Ok(Arc::new(Told { comm: self.comm.group(ranks)?, ..self.clone() }))
    }
    fn traffic(&self) -> Traffic {
        self.comm.traffic()
    }
    fn fail(&self, cause: &str) {
        self.comm.fail(cause);
    }
    fn failure(&self) -> Option<comm::Error> {
        self.comm.failure()
    }
}

/// A linear map that tells when it is computed, forward and backward.
struct Unit {
    linear: Linear,
    tell: Tell,
}
parameters!(Unit { linear });

#[derive(Clone)]
struct Tell {
    rank: usize,
    events: Arc<Events>,
    overlapping: Arc<Vec<Calls>>,
}

impl Module for Unit {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        self.tell.events.computes(self.tell.rank, &self.tell.overlapping);
        Ok(self.tell.clone().apply(&[&self.linear.forward(x)?])?.remove(0))
    }
}

/// The identity.
impl Function for Tell {
    fn name(&self) -> &'static str {
        "tell"
    }
    fn forward(&self, inputs: &[&Tensor]) -> autograd::Result<Vec<Tensor>> {
        Ok(vec![inputs[0].copy()?])
    }
    fn backward(&self, cx: &Cx<'_>, _: &[SavedVariable]) -> autograd::Result<Grads> {
        self.events.computes(self.rank, &self.overlapping);
        grads1(cx.dy().clone())
    }
}

/// Units that compute in the order of registration, or in the opposite one.
struct Units {
    units: Vec<WrappedUnit<Unit>>,
    reversed: bool,
}
parameters!(Units { units });

impl Module for Units {
    fn forward(&self, x: &Var) -> phalanx_nn::Result<Var> {
        let place = |i: usize| if self.reversed { UNITS - 1 - i } else { i };
        (0..UNITS).try_fold(x.clone(), |x, i| self.units[place(i)].forward(&x))
    }
}

/// What counts of a run.
#[derive(Clone, Copy, PartialEq)]
enum Counted {
    /// The first pass.
    Pass,
    /// The update after the first pass, and the next forward pass.
    Update,
}

/// What rank 0 sees while it computes each unit of what counts, if calls overlap with them as `overlapping` says. The model's units
/// are registered in the order in which they compute, or in the opposite one.
fn seen(config: &ZeroConfig, overlapping: &[Calls], counted: Counted, reversed: bool) -> Vec<[Calls; 2]> {
    let (events, overlapping) = (Arc::new(Events::default()), Arc::new(overlapping.to_vec()));
    let run = |rank: Rank| -> Result<()> {
        let number = rank.rank();
        let tell = Tell { rank: number, events: events.clone(), overlapping: overlapping.clone() };
        let unit = |i| -> Result<_> {
            let scope = Scope::new(1, DType::F32, rank.device()).child(i);
            let linear = LinearConfig::new(16, 16).with_bias(false).init(&scope)?;
            Ok(WrappedUnit::new(Arc::new(Unit { linear, tell: tell.clone() })))
        };
        let model = (0..UNITS).map(unit).collect::<Result<Vec<_>>>()?;
        let told = Told {
            comm: rank.comm().clone(),
            rank: number,
            holds: number == 1 && config.prefetch.forward > 0,
            events: events.clone(),
            overlapping: overlapping.clone(),
        };
        let ended = events.clone();
        let comm = observed(
            Arc::new(told),
            Arc::new(move |call| {
                if let Some(place) = place(call.kind).filter(|_| number == 0) {
                    ended.note(|state| state.ended[place] += usize::from(state.counts[0]), |_| true);
                }
            }),
        );
        let model = Units { units: model, reversed };
        let zero = Zero::new(&model, comm, config.clone())?;
        let count = || events.state.lock().unwrap().counts[number] = true;
        let x = Var::new(Tensor::zeros(&[2, 16], DType::F32, rank.device())?);
        if counted == Counted::Pass {
            count();
            return zero.backward(&model.forward(&x)?.sum_all()?);
        }
        zero.backward(&model.forward(&x)?.sum_all()?)?;
        Sgd::default().init(vec![Group::new(zero.parameters(), 0.5)])?.step()?;
        count();
        zero.updated()?;
        model.forward(&x)?;
        Ok(())
    };
    Threads::new(2).timeout(4 * LONG).run(run).unwrap();
    let state = std::mem::take(&mut *events.state.lock().unwrap());
    assert!(!state.late, "{config:?}: the ranks have waited for each other: {:?}", state.seen);
    state.seen
}

/// What rank 0 sees in the first pass.
fn pass(config: &ZeroConfig, overlapping: &[Calls]) -> Vec<[Calls; 2]> {
    seen(config, overlapping, Counted::Pass, false)
}

fn config(stage: ZeroStage, prefetch: bool) -> ZeroConfig {
    ZeroConfig { prefetch: prefetch.into(), reshard: Reshard::Always, ..ZeroConfig::new(stage) }
}

/// The gathers that have ended while unit number k of a pass is computed, forward and then backward: those of the units up to it, and of the
/// next one if there is one in that direction.
fn gathers(stage: ZeroStage, prefetch: bool) -> impl Fn(usize) -> usize {
    move |k| match (stage, prefetch && (k + 1) % UNITS != 0) {
        (ZeroStage::Parameters, next) => k + 1 + usize::from(next),
        _ => 0,
    }
}

/// The reduce-scatters: of the units whose backward pass is over.
fn reduce_scatters(k: usize) -> usize {
    k.saturating_sub(UNITS)
}

#[test]
fn the_next_units_gather_and_the_last_ones_reduce_scatter_end_while_a_unit_computes() {
    for stage in STAGES {
        let gathers = gathers(stage, true);
        let wanted: Vec<Calls> = (0..2 * UNITS).map(|k| [gathers(k), reduce_scatters(k)]).collect();
        let seen = pass(&config(stage, true), &wanted);
        assert_eq!(seen, wanted.iter().map(|calls| [*calls; 2]).collect::<Vec<_>>(), "{stage:?}");
    }
}

#[test]
fn without_prefetch_no_gather_is_started_before_its_unit() {
    for stage in STAGES {
        let gathers = gathers(stage, false);
        let wanted: Vec<Calls> = (0..2 * UNITS).map(|k| [gathers(k), reduce_scatters(k)]).collect();
        let seen = pass(&config(stage, false), &wanted);
        assert_eq!(seen, wanted.iter().map(|calls| [*calls; 2]).collect::<Vec<_>>(), "{stage:?}");
    }
}

/// Unit k+1's values are on their way when unit k computes, and come meanwhile; also where units compute in another order than that in
/// which they are registered.
#[test]
fn after_an_update_each_units_values_come_while_the_unit_before_computes() {
    for (stage, reversed) in
        [ZeroStage::Optimizer, ZeroStage::Gradients].map(|s| [(s, false), (s, true)]).concat()
    {
        let ended = |k: usize| [(k + 2).min(UNITS), 0];
        let overlapping: Vec<Calls> = (0..UNITS).map(ended).collect();
        let wanted: Vec<[Calls; 2]> = overlapping.iter().map(|calls| [[UNITS, 0], *calls]).collect();
        assert_eq!(seen(&config(stage, true), &overlapping, Counted::Update, reversed), wanted, "{stage:?}");
    }
}

/// Ranks may leave out different parameters, so no rank may call for its gradients while units are gathered.
#[test]
fn where_parameters_may_be_unused_and_are_sharded_gradients_are_sent_after_the_pass() {
    let gathers = gathers(ZeroStage::Parameters, true);
    let wanted: Vec<Calls> = (0..2 * UNITS).map(|k| [gathers(k), 0]).collect();
    let seen = pass(&ZeroConfig { find_unused: true, ..config(ZeroStage::Parameters, true) }, &wanted);
    assert_eq!(seen, wanted.iter().map(|calls| [*calls; 2]).collect::<Vec<_>>());
}
